"""What strikes whom in each run, as a file that has it again."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast, final

from paceline.engines.striking import KINDS, SERVER_PLACES, Place, Strike, kinds_of
from paceline.engines.striking.kinds import Who
from paceline.errors import UsageError
from paceline.running.chaos import launcher
from paceline.running.chaos.program import PLACES

_PLACES: Mapping[Who, Mapping[str, Place]] = {
    "worker": PLACES,
    "server": SERVER_PLACES,
    "launcher": launcher.PLACES,
}


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
            if lack := KINDS[strike.kind].lacks():
                raise UsageError(f"the schedule has {strike}: {lack}")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"runs": [asdict(scene) for scene in self.scenes]}, indent=1) + "\n")


def require_hosts(given: Schedule | None, far: Sequence[Sequence[str]]) -> None:
    """Raises UsageError where a schedule strikes the host of a worker, and there are none but the launcher's."""
    for strike in () if given is None else (strike for scene in given.scenes for strike in scene.strikes):
        if KINDS[strike.kind].is_of_host and not far:
            raise UsageError(
                f"the schedule has {strike}: hosts are struck where those of the run, but for the launcher's, are "
                "network namespaces of this machine, in a Ray cluster that --address names"
            )


def _scene(plain: Mapping[str, Any]) -> Scene:
    strikes: Sequence[Mapping[str, Any]] = plain["strikes"]
    return Scene(tuple(_checked(Strike(**strike)) for strike in strikes), int(plain["replacements"]))


def _checked(strike: Strike) -> Strike:
    named = re.fullmatch(r"(worker|server)-\d+|launcher", strike.who)
    if named is None:
        raise ValueError(f"{strike.who!r} is no worker-N or server-N, and not the launcher")
    who = cast(Who, named[1] or "launcher")
    places, kinds = _PLACES[who], kinds_of(who)
    if strike.place not in places or strike.kind not in kinds or strike.number < 1:
        raise ValueError(f"{strike} is not to come: places are {', '.join(places)}; kinds {', '.join(kinds)}")
    return strike
