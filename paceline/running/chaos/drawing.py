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
_CALLS_OF_A_MOVE, _EARLY_CALLS = 3, 20
"""Among so many calls of a place is one that is drawn: of those while something moves, and of a server that joins."""


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
    may be struck by what it outlives. In elastic runs servers may join, so that some die while copies and key ranges
    move, and one that has joined may be struck, too."""
    names, places = _named(calls, "server"), role.places
    victims, joiner = chance.sample(names, chance.randint(1, role.most)), f"server-{len(names)}"
    asking, replacements = list[Strike](), beside.replacements
    if role.is_elastic:
        replacements = max(replacements, chance.randint(0, 1))
        asking = [_often(chance, calls, chance.choice(names), places.often, "more-servers")] * chance.randint(0, 1)
    if asking and chance.random() < 0.3:  # it dies in place of one of the start
        victims[-1] = joiner
    as_joiner = _at_a_first_copy(chance, role, joiner) if asking or replacements else []
    workers_die = any(strike.is_deadly for strike in beside.strikes)
    later = [*(places.after_a_death if workers_die else ()), *(places.at_a_join if beside.replacements else ())]
    strikes = []
    for victim in victims:
        may_move = asking or (replacements and victim != victims[0])
        places_now = [*later, *(places.at_a_move if may_move else ())]
        if victim == joiner:
            place, number = chance.choice([*places.often, *places.at_a_move]), chance.randint(1, _EARLY_CALLS)
            strikes.append(Strike(victim, place, number, _deadly(chance, role)))
        elif places_now and chance.random() < 0.5:
            place = chance.choice(places_now)
            number = chance.randint(1, _CALLS_OF_A_MOVE) if place in places.at_a_move else 1
            strikes.append(Strike(victim, place, number, _deadly(chance, role)))
        else:
            strikes.append(_often(chance, calls, victim, places.often, _deadly(chance, role)))
    outliving = _outliving(chance, calls, role, victims)
    return Scene((*beside.strikes, *asking, *strikes, *as_joiner, *outliving), replacements)


def _at_a_first_copy(chance: Random, role: Role, joiner: str) -> list[Strike]:
    """A server that joins may die with the first copy that it is given, while it is none yet, or be struck by what it
    outlives. A segmentation fault takes its time, in which others might let go of copies that it has got."""
    place, number = chance.choice([*role.places.as_joiner]), chance.randint(1, _CALLS_OF_A_MOVE)
    deadly = [kind for kind in _of_process(role, is_outlived=False) if kind != "segfault"]
    kinds = chance.choice([deadly, _of_process(role, is_outlived=True), []])
    return [Strike(joiner, place, number, chance.choice(kinds))] if kinds else []


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
    return chance.choice(_of_process(role, is_outlived=False))


def _outlived(chance: Random, role: Role) -> str:
    return chance.choice(_of_process(role, is_outlived=True))


def _of_process(role: Role, *, is_outlived: bool) -> list[str]:
    kinds = {name: KINDS[name] for name in kinds_of(role.who, is_outlived=is_outlived)}
    some = {name: kind for name, kind in kinds.items() if role.is_elastic or not kind.takes_elastic}
    return [name for name, kind in some.items() if not (kind.is_of_host or kind.lacks())]


def _often(chance: Random, calls: Calls, who: str, places: Mapping[str, Any], kind: str) -> Strike:
    """Not in the first tenth of its calls, where the run may not have begun, nor in the last fifth, since another
    run may have fewer."""
    place = chance.choice([place for place in places if calls[who].get(place)])
    num_calls = calls[who][place]
    first = num_calls // 10 + 1
    return Strike(who, place, chance.randint(first, max(first, num_calls * 4 // 5)), kind)
