"""What strikes whom in each run, drawn from a seed, as a file that has it again."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Self, final

from paceline.engines import striking
from paceline.engines.striking import SERVER_PLACES, Kind, Strike
from paceline.errors import UsageError
from paceline.running.chaos import launcher
from paceline.running.chaos.program import AFTER_A_DEATH, AS_JOINER, AT_A_JOIN, OFTEN, PLACES

_KINDS: tuple[Kind, ...] = ("kill", "segfault", "stop", "hold")
_SERVER_KINDS: tuple[Kind, ...] = ("kill", "segfault")
_OUTLIVED: tuple[Kind, ...] = ("pause", "cut")
_STRUCK: Mapping[str | None, tuple[Mapping[str, Any], tuple[Kind, ...]]] = {
    "worker": (PLACES, (*_KINDS, *_OUTLIVED)),
    "server": (SERVER_PLACES, (*_SERVER_KINDS, *_OUTLIVED)),
    None: (launcher.PLACES, ("kill", "full")),
}
"""Where, and how; none: the launcher."""
Calls = Mapping[str, Mapping[str, int]]
"""How often each process comes to each place in an undisturbed run."""


@final
@dataclass(frozen=True)
class Scene:
    """One run's strikes, and how many new workers start in dead ones' places."""

    strikes: tuple[Strike, ...]
    replacements: int = 0


@final
@dataclass(frozen=True)
class Schedule:
    """The runs of a campaign."""

    scenes: tuple[Scene, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises UsageError if there is no schedule in the file, or nobody could be struck so."""
        try:
            return cls(tuple(_scene(each) for each in json.loads(path.read_text())["runs"]))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path} is no schedule that `paceline chaos` wrote: {error!r}") from None

    def require(self, names: str) -> None:
        """Raises UsageError for whoever is not the launcher, or of these ("worker" or "server"), and for what cannot
        be done here."""
        for strike in (strike for scene in self.scenes for strike in scene.strikes):
            if not strike.who.startswith((names, "launcher")):
                raise UsageError(
                    f"the schedule strikes {strike.who}, and chaos strikes each {names} under this strategy"
                )
            if strike.kind not in outlived() and strike.kind in _OUTLIVED:
                raise UsageError(f"the schedule has {strike}: closing connections takes root, iproute2's ss and Linux")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"runs": [asdict(scene) for scene in self.scenes]}, indent=1) + "\n")


def outlived() -> tuple[Kind, ...]:
    """How processes can be struck here that go on all the same."""
    return _OUTLIVED if striking.can_cut() else ("pause",)


def of_workers(chance: Random, calls: Calls, *, most: int) -> Scene:
    """At most so many workers die, one after another or at once; one may be replaced, and the new one die as it joins;
    another one may be struck by what it outlives."""
    names = sorted(calls, key=lambda name: int(name.rpartition("-")[2]))
    victims = chance.sample(names, chance.randint(1, most))
    replacements = chance.randint(0, 1)
    later = [*AFTER_A_DEATH, *(AT_A_JOIN if replacements else ())]
    strikes = [
        Strike(victim, chance.choice(later), 1, chance.choice(_KINDS))
        if victim != victims[0] and chance.random() < 0.5
        else _often(chance, calls, victim, OFTEN, chance.choice(_KINDS))
        for victim in victims
    ]
    if replacements and chance.random() < 0.3:
        strikes.append(Strike(f"worker-{len(names)}", next(iter(AS_JOINER)), 1, chance.choice(_KINDS)))
    others = [name for name in names if name not in victims]
    if chance.random() < 0.5:
        strikes.append(_often(chance, calls, chance.choice(others), OFTEN, chance.choice(outlived())))
    return Scene(tuple(strikes), replacements)


def of_servers(chance: Random, calls: Calls, *, most: int) -> Scene:
    """At most so many servers die; another one may be struck by what it outlives."""
    names = sorted(calls)
    victims = chance.sample(names, chance.randint(1, most))
    strikes = [_often(chance, calls, each, SERVER_PLACES, chance.choice(_SERVER_KINDS)) for each in victims]
    others = [name for name in names if name not in victims]
    if chance.random() < 0.5:
        strikes.append(_often(chance, calls, chance.choice(others), SERVER_PLACES, chance.choice(outlived())))
    return Scene(tuple(strikes))


def of_launcher(chance: Random) -> Scene:
    """It dies, perhaps just after a checkpoint could not be written, so that another one goes on from the one before.
    Of ten checkpoints the first is to be there, and one is to come."""
    number = chance.randint(2, 8)
    if chance.random() < 0.5:
        full = Strike("launcher", launcher.WRITES, number, "full")
        return Scene((full, Strike("launcher", launcher.WRITES, number + 1, "kill")))
    return Scene((Strike("launcher", chance.choice(list(launcher.PLACES)), number, "kill"),))


def _often(chance: Random, calls: Calls, who: str, places: Mapping[str, Any], kind: Kind) -> Strike:
    """Not in the first tenth of its calls, where the run may not have begun, nor in the last fifth, since another
    run may have fewer."""
    place = chance.choice([place for place in places if calls[who].get(place)])
    num_calls = calls[who][place]
    first = num_calls // 10 + 1
    return Strike(who, place, chance.randint(first, max(first, num_calls * 4 // 5)), kind)


def _scene(plain: Mapping[str, Any]) -> Scene:
    strikes: Sequence[Mapping[str, Any]] = plain["strikes"]
    return Scene(tuple(_checked(Strike(**strike)) for strike in strikes), int(plain["replacements"]))


def _checked(strike: Strike) -> Strike:
    named = re.fullmatch(r"(worker|server)-\d+|launcher", strike.who)
    if named is None:
        raise ValueError(f"{strike.who!r} is no worker-N or server-N, and not the launcher")
    places, kinds = _STRUCK[named[1]]
    if strike.place not in places or strike.kind not in kinds or strike.number < 1:
        raise ValueError(f"{strike} is not to come: places are {', '.join(places)}; kinds {', '.join(kinds)}")
    return strike
