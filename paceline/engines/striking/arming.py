"""A process that is struck where that was drawn. A place is a method: the process is struck when it has been called so
often."""

import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from paceline.engines.striking import hosts
from paceline.engines.striking.kinds import KINDS

VARIABLE = "PACELINE_STRIKES"
"""This environment variable names the folder of the run that is struck. `strikes.json` lies there."""
Place = tuple[Any, str]
"""A class or module, and its method or function."""


@final
@dataclass(frozen=True, kw_only=True)
class Places:
    """Where members of one role may be struck, by name: `often` is where they come to in an undisturbed run."""

    often: Mapping[str, Place]
    after_a_death: Mapping[str, Place] = field(default_factory=dict)
    """Where others come to when a worker has died."""
    at_a_join: Mapping[str, Place] = field(default_factory=dict)
    """Where others come to when a worker joins."""
    at_a_move: Mapping[str, Place] = field(default_factory=dict)
    """Where servers come to when one has died or joined, and copies and key ranges move."""
    as_joiner: Mapping[str, Place] = field(default_factory=dict)
    """Where one that joins comes to."""

    @property
    def all(self) -> Mapping[str, Place]:
        return {**self.often, **self.after_a_death, **self.at_a_join, **self.at_a_move, **self.as_joiner}


@final
@dataclass(frozen=True)
class Strike:
    """Who is struck, by what, and at which call of which place."""

    who: str
    place: str
    number: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.who}, {self.place} ({self.number})"

    @property
    def is_deadly(self) -> bool:
        return not KINDS[self.kind].is_outlived

    @property
    def mark(self) -> str:
        """The name of a file that says that it has come to pass."""
        return f"{self.kind} {self.who} {self.place} {self.number}"


def arm(who: str, places: Mapping[str, Place], *, may_strike: Callable[[str], bool] = lambda place: True) -> None:
    """Have this process struck where that was drawn. It writes down how often it comes to each place.

    `may_strike`: whether it may be struck at a place now; otherwise it is the next time.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        return
    (Path(named) / "networks" / who).write_text(str(hosts.network()))
    given = (Strike(**each) for each in json.loads(Path(named, "strikes.json").read_text()))
    drawn = sorted(given, key=lambda each: each.number)
    for place, (owner, name) in places.items():
        left = [each for each in drawn if (each.who, each.place) == (who, place) and not _has_met(each, Path(named))]
        setattr(owner, name, _watched(getattr(owner, name), Path(named), who, place, left, may_strike))


def met(strikes: Sequence[Strike], folder: Path) -> tuple[Strike, ...]:
    """Those that have come to pass in the run of this folder."""
    return tuple(each for each in strikes if _has_met(each, folder))


def _has_met(strike: Strike, folder: Path) -> bool:
    return (folder / "struck" / strike.mark).exists()


def _watched(
    method: Callable[..., Any],
    folder: Path,
    who: str,
    place: str,
    left: list[Strike],
    may_strike: Callable[[str], bool],
) -> Callable[..., Any]:
    calls = Path(folder, "calls", f"{who} {place}").open("ab", buffering=0)  # noqa: SIM115 - as long as the process
    numbers = itertools.count(1)

    @functools.wraps(method)
    def watched(*given: Any, **named: Any) -> Any:
        calls.write(b".")
        number = next(numbers)
        if not left or number < left[0].number or not may_strike(place):
            return method(*given, **named)
        strike = left.pop(0)
        kind = KINDS[strike.kind]
        is_beside = is_of_launchers_host(folder, who)
        if (kind.is_of_host and is_beside) or (kind.asks_launcher and not is_beside):
            return method(*given, **named)
        (folder / "struck" / strike.mark).touch()
        with kind.do(folder):
            return method(*given, **named)

    return watched


def is_of_launchers_host(folder: Path, who: str) -> bool:
    """Whether this member's links are the launcher's."""
    return network_of(folder, who) == network_of(folder, "launcher")


def network_of(folder: Path, who: str) -> str:
    """The same for exactly those of a run that have the same links; empty if it has not begun."""
    path = folder / "networks" / who
    return path.read_text() if path.exists() else ""
