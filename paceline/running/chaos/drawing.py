"""What strikes whom, drawn."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from paceline.engines.striking import KINDS, SERVER_PLACES, Strike, kinds_of
from paceline.engines.striking.kinds import Who
from paceline.running.chaos import launcher
from paceline.running.chaos.program import AFTER_A_DEATH, AS_JOINER, AT_A_JOIN, OFTEN
from paceline.running.chaos.schedule import Scene

Calls = Mapping[str, Mapping[str, int]]
"""How often each process comes to each place in an undisturbed run."""


def of_workers(chance: Random, calls: Calls, *, most: int) -> Scene:
    """At most so many workers die, one after another or at once; one may be replaced, and the new one die as it joins;
    another one may be struck by what it outlives."""
    names = sorted(calls, key=lambda name: int(name.rpartition("-")[2]))
    victims = chance.sample(names, chance.randint(1, most))
    replacements = chance.randint(0, 1)
    later = [*AFTER_A_DEATH, *(AT_A_JOIN if replacements else ())]
    strikes = [
        Strike(victim, chance.choice(later), 1, _deadly(chance, "worker"))
        if victim != victims[0] and chance.random() < 0.5
        else _often(chance, calls, victim, OFTEN, _deadly(chance, "worker"))
        for victim in victims
    ]
    if replacements and chance.random() < 0.3:
        strikes.append(Strike(f"worker-{len(names)}", next(iter(AS_JOINER)), 1, _deadly(chance, "worker")))
    others = [name for name in names if name not in victims]
    if chance.random() < 0.5:
        strikes.append(_often(chance, calls, chance.choice(others), OFTEN, _outlived(chance, "worker")))
    return Scene(tuple(strikes), replacements)


def of_servers(chance: Random, calls: Calls, *, most: int) -> Scene:
    """At most so many servers die; another one may be struck by what it outlives."""
    names = sorted(calls)
    victims = chance.sample(names, chance.randint(1, most))
    strikes = [_often(chance, calls, each, SERVER_PLACES, _deadly(chance, "server")) for each in victims]
    others = [name for name in names if name not in victims]
    if chance.random() < 0.5:
        strikes.append(_often(chance, calls, chance.choice(others), SERVER_PLACES, _outlived(chance, "server")))
    return Scene(tuple(strikes))


def of_launcher(chance: Random) -> Scene:
    """It dies, perhaps just after a checkpoint could not be written, so that another one goes on from the one before.
    Of ten checkpoints the first is to be there, and one is to come."""
    number = chance.randint(2, 8)
    if chance.random() < 0.5:
        full = Strike("launcher", launcher.WRITES, number, "full")
        return Scene((full, Strike("launcher", launcher.WRITES, number + 1, "kill")))
    return Scene((Strike("launcher", chance.choice(list(launcher.PLACES)), number, "kill"),))


def of_host(chance: Random, calls: Calls, hosts: Sequence[Sequence[str]], *, most: int) -> Scene | None:
    """One of these hosts, given by their workers, is struck with all that is on it; of more than so many workers, by
    what they outlive. None where nothing can be done here."""
    host = chance.choice(hosts)
    names = [name for name, kind in KINDS.items() if kind.is_of_host and not kind.lacks()]
    fitting = [name for name in names if KINDS[name].is_outlived or len(host) <= most]
    return Scene((_often(chance, calls, chance.choice(host), OFTEN, chance.choice(fitting)),)) if fitting else None


def _deadly(chance: Random, who: Who) -> str:
    return chance.choice(_of_process(who, is_outlived=False))


def _outlived(chance: Random, who: Who) -> str:
    return chance.choice(_of_process(who, is_outlived=True))


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
