"""What strikes whom in each run, as a file that has it again."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast, final

from paceline.engines.striking import KINDS, SERVERS, Place, Strike, kinds_of
from paceline.engines.striking.kinds import Who
from paceline.errors import UsageError
from paceline.running.chaos import launcher
from paceline.running.chaos.program import PLACES
from paceline.running.chaos.roles import Role

_PLACES: Mapping[Who, Mapping[str, Place]] = {
    "worker": {name: place for places in PLACES.values() for name, place in places.all.items()},
    "server": SERVERS.all,
    "launcher": launcher.PLACES,
}


@final
@dataclass(frozen=True)
class Scene:
    """One run's strikes, and how many new workers start in dead ones' places, and as many new servers."""

    strikes: tuple[Strike, ...]
    replacements: int = 0

    @property
    def num_grown(self) -> int:
        """By so many workers the run is larger than at first, where it is asked to grow."""
        return sum(strike.kind == "grow" for strike in self.strikes)

    @property
    def num_servers_more(self) -> int:
        """So many servers are asked for beside those of the start."""
        return sum(strike.kind == "more-servers" for strike in self.strikes)

    @property
    def num_workers_dying(self) -> int:
        return sum(strike.is_deadly and strike.who.startswith("worker") for strike in self.strikes)


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

    def require(self, roles: Sequence[Role]) -> None:
        """Raises UsageError for whoever is not the launcher, or of these roles, and for what cannot be done here."""
        for strike in (strike for scene in self.scenes for strike in scene.strikes):
            if lack := self._lack(strike, roles) or KINDS[strike.kind].lacks():
                raise UsageError(f"the schedule has {strike}: {lack}")

    @staticmethod
    def _lack(strike: Strike, roles: Sequence[Role]) -> str:
        """Why nobody can be struck so in these runs; empty where somebody can."""
        if strike.who == "launcher":
            return ""
        role = next((role for role in roles if strike.who.startswith(role.who)), None)
        if role is None:
            return f"in these runs no others are struck than each {' and '.join(role.who for role in roles)}"
        if strike.place not in role.places.all:
            return f"its places in these runs are {', '.join(role.places.all)}"
        if KINDS[strike.kind].takes_elastic and not role.is_elastic:
            return "a silent server is ended with --elastic alone, with which others may join, too"
        return ""

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
