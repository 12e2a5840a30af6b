"""What strikes whom, drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from paceline.engines.striking import KINDS, Strike, kinds_of
from paceline.engines.striking.kinds import Who
from paceline.running.chaos import launcher
from paceline.running.chaos.roles import Role
from paceline.running.chaos.schedule import Scene

Calls = Mapping[str, Mapping[str, int]]
"""How often each process comes to each place in an undisturbed run."""
NOBODY = Scene(())


def of_members(chance: Random, calls: Calls, roles: Sequence[Role], *, left: int) -> Scene:
    """Those of one of these roles are struck, workers or servers, or of both; at most so many die."""
    chosen = chance.sample(list(roles), chance.randint(1, min(left, len(roles))))
    struck = [replace(role, most=min(role.most, left // len(chosen))) for role in roles if role in chosen]
    scene = NOBODY
    for role in struck:
        scene = of_workers(chance, calls, role) if role.who == "worker" else of_servers(chance, calls, role, scene)
    return scene


def of_workers(chance: Random, calls: Calls, role: Role) -> Scene:
    """Some die, one after another or at once; one may be replaced, and the new one die as it joins; another one may be
    struck by what it outlives."""
    names, places = _named(calls, "worker"), role.places
    victims = chance.sample(names, chance.randint(1, role.most))
    replacements = chance.randint(0, 1)
    later = [*places.after_a_death, *(places.at_a_join if replacements else ())]
    strikes = [
        Strike(victim, chance.choice(later), 1, _deadly(chance, role))
        if victim != victims[0] and chance.random() < 0.5
        else _often(chance, calls, victim, places.often, _deadly(chance, role))
        for victim in victims
    ]
    if replacements and chance.random() < 0.3:
        strikes.append(Strike(f"worker-{len(names)}", next(iter(places.as_joiner)), 1, _deadly(chance, role)))
    return Scene((*strikes, *_outliving(chance, calls, role, victims)), replacements)


def of_servers(chance: Random, calls: Calls, role: Role, beside: Scene = NOBODY) -> Scene:
    """Some die, of whom some do so while others let go or let in the workers that die or join beside them; another one
    may be struck by what it outlives."""
    names, places = _named(calls, "server"), role.places
    victims = chance.sample(names, chance.randint(1, role.most))
    workers_die = any(strike.is_deadly for strike in beside.strikes)
    later = [*(places.after_a_death if workers_die else ()), *(places.at_a_join if beside.replacements else ())]
    strikes = [
        Strike(victim, chance.choice(later), 1, _deadly(chance, role))
        if later and chance.random() < 0.5
        else _often(chance, calls, victim, places.often, _deadly(chance, role))
        for victim in victims
    ]
    return Scene((*beside.strikes, *strikes, *_outliving(chance, calls, role, victims)), beside.replacements)


def of_launcher(chance: Random) -> Scene:
    """It dies, perhaps just after a checkpoint could not be written, so that another one goes on from the one before.
    Of ten checkpoints the first is to be there, and one is to come."""
    number = chance.randint(2, 8)
    if chance.random() < 0.5:
        full = Strike("launcher", launcher.WRITES, number, "full")
        return Scene((full, Strike("launcher", launcher.WRITES, number + 1, "kill")))
    return Scene((Strike("launcher", chance.choice(list(launcher.PLACES)), number, "kill"),))


def of_host(
    chance: Random, calls: Calls, roles: Sequence[Role], hosts: Sequence[Sequence[str]], *, left: int
) -> Scene | None:
    """One of these hosts, given by who of the run is there, is struck with all that is on it, while one of them does
    what its role does; of more than may die, by what they outlive. None where nothing can be done here."""
    host = chance.choice(hosts)
    places = {name: role.places.often for role in roles for name in host if name.startswith(role.who)}
    by_role = [(role.most, sum(name.startswith(role.who) for name in host)) for role in roles]
    may_die = len(places) == len(host) <= left and all(number <= most for most, number in by_role)
    names = [name for name, kind in KINDS.items() if kind.is_of_host and not kind.lacks()]
    fitting = [name for name in names if KINDS[name].is_outlived or may_die]
    if not fitting or not places:
        return None
    who = chance.choice(list(places))
    return Scene((_often(chance, calls, who, places[who], chance.choice(fitting)),))


def _named(calls: Calls, who: Who) -> list[str]:
    names = [name for name in calls if name.startswith(who)]
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def _outliving(chance: Random, calls: Calls, role: Role, victims: Sequence[str]) -> list[Strike]:
    """Perhaps another one is struck by what it outlives."""
    others = [name for name in _named(calls, role.who) if name not in victims]
    if chance.random() >= 0.5:
        return []
    return [_often(chance, calls, chance.choice(others), role.places.often, _outlived(chance, role))]


def _deadly(chance: Random, role: Role) -> str:
    kinds = _of_process(role.who, is_outlived=False)
    return chance.choice([kind for kind in kinds if role.is_ended_silent or not KINDS[kind].is_silent])


def _outlived(chance: Random, role: Role) -> str:
    return chance.choice(_of_process(role.who, is_outlived=True))


def _of_process(who: Who, *, is_outlived: bool) -> list[str]:
    names = kinds_of(who, is_outlived=is_outlived)
    return [name for name in names if not (KINDS[name].is_of_host or KINDS[name].lacks())]


def _often(chance: Random, calls: Calls, who: str, places: Mapping[str, Any], kind: str) -> Strike:
    """Not in the first tenth of its calls, where the run may not have begun, nor in the last fifth, since another
    run may have fewer."""
    place = chance.choice([place for place in places if calls[who].get(place)])
    num_calls = calls[who][place]
    first = num_calls // 10 + 1
    return Strike(who, place, chance.randint(first, max(first, num_calls * 4 // 5)), kind)
