"""What a worker says to its deputy, several things in a frame, and what it is answered."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.engines.scripting import Outcome
from paceline.records import Record


class Begin(NamedTuple):
    """Something to be started at the worker's time, which it does not wait for: a call of the deputy's."""

    clock_s: float
    method: str
    arguments: tuple[Any, ...]


class Ask(NamedTuple):
    """The last thing in a frame: a call of the deputy's that the worker waits for."""

    clock_s: float
    method: str
    arguments: tuple[Any, ...]
    ahead_s: float | None
    """For how long nothing that others could notice comes after the answer, if the worker goes on; none: not known."""


class Busy(NamedTuple):
    """The last thing in a frame: nothing that others could notice comes before this time of the worker's."""

    until_s: float


class Keep(NamedTuple):
    """A record."""

    record: Record


class Print(NamedTuple):
    """A line of the script's output."""

    line: str


class Over(NamedTuple):
    """The last thing of all."""

    outcome: Outcome


class Answer(NamedTuple):
    """To an `Ask`; the first one has the worker begin."""

    now_s: float
    """The worker's clock."""
    timings: tuple[dict[str, Any], dict[str, Any]]
    """Of its collective and its store so far: what `Timing` has."""
    is_stopping: bool
    """The user wants the run to end at the next step."""
    is_ending: bool
    """Another member has failed."""
    goes_on: bool
    """The worker may be done with its step, and nothing keeps it from the next."""
    value: Any = None
    error: Exception | None = None
