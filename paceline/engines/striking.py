"""Strikes a process of a chaos run, by a signal or by holding its interpreter, at a drawn place of the protocol.

Outside such runs nothing is done here. A place is a method: the process is struck when it has been called so often.
"""

import ctypes
import functools
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from paceline.server.replication import Replication

VARIABLE = "PACELINE_STRIKES"
"""This environment variable names the folder of the run that is struck. `strikes.json` lies there."""
Kind = Literal["kill", "segfault", "stop", "hold", "pause"]
"""stop: for good, and hold: the interpreter; both until the process is ended as silent. pause: stopped for a second,
which it outlives."""
Place = tuple[type[Any], str]

SERVER_PLACES: Mapping[str, Place] = {
    "is asked": (Replication, "_serve"),
    "takes what the copy before hands on": (Replication, "_take"),
    "hands on to the next copy": (Replication, "_hand_on"),
    "tells the copy before that it has it": (Replication, "_acknowledge"),
}
_SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
HELD_S = 30
PAUSED_S = 1


@final
@dataclass(frozen=True)
class Strike:
    """Who is struck, by what, and at which call of which place."""

    who: str
    place: str
    number: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} {self.who}, {self.place} ({self.number})"

    @property
    def is_deadly(self) -> bool:
        return self.kind != "pause"


def arm(who: str, places: Mapping[str, Place], *, may_strike: Callable[[str], bool] = lambda place: True) -> None:
    """Have this process struck where that was drawn. It writes down how often it comes to each place.

    `may_strike`: whether it may be struck at a place now; otherwise it is the next time.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        return
    drawn = [Strike(**each) for each in json.loads(Path(named, "strikes.json").read_text())]
    for place, (owner, name) in places.items():
        strike = next((each for each in drawn if (each.who, each.place) == (who, place)), None)
        setattr(owner, name, _watched(getattr(owner, name), Path(named), who, place, strike, may_strike))


def _watched(
    method: Callable[..., Any],
    folder: Path,
    who: str,
    place: str,
    strike: Strike | None,
    may_strike: Callable[[str], bool],
) -> Callable[..., Any]:
    calls = Path(folder, "calls", f"{who} {place}").open("ab", buffering=0)  # noqa: SIM115 - as long as the process
    numbers, left = itertools.count(1), [strike] if strike is not None else []

    @functools.wraps(method)
    def watched(*given: Any, **named: Any) -> Any:
        calls.write(b".")
        number = next(numbers)
        if left and number >= left[0].number and may_strike(place):
            Path(folder, "struck", f"{who} {place}").touch()
            _strike(left.pop().kind)
        return method(*given, **named)

    return watched


def _strike(kind: Kind) -> None:
    if kind == "hold":
        ctypes.PyDLL(None).sleep(HELD_S)
        return
    if kind == "pause":
        subprocess.Popen(["sh", "-c", f"sleep {PAUSED_S}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), _SIGNALS[kind])
