"""Strikes a process of a chaos run, by a signal or by what it lacks, at a drawn place of the protocol.

Outside such runs nothing is done here. A place is a method: the process is struck when it has been called so often.
"""

import ctypes
import functools
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import psutil

from paceline.messages import Message
from paceline.server.replication import Replication
from paceline.server.shard import Closed

VARIABLE = "PACELINE_STRIKES"
"""This environment variable names the folder of the run that is struck. `strikes.json` lies there."""
Kind = Literal["kill", "segfault", "stop", "hold", "pause", "cut", "full"]
"""stop: for good, and hold: the interpreter; both until the process is ended as silent. pause: stopped for a second;
cut: its connections are closed; full: files cannot grow while the place is being called. It outlives these three."""
Address = tuple[str, int]
Place = tuple[Any, str]
"""A class or module, and its method or function."""

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
        return self.kind not in ("pause", "cut", "full")

    @property
    def mark(self) -> str:
        """The name of a file that says that it has come to pass."""
        return f"{self.who} {self.place} {self.number}"


def arm(who: str, places: Mapping[str, Place], *, may_strike: Callable[[str], bool] = lambda place: True) -> None:
    """Have this process struck where that was drawn. It writes down how often it comes to each place.

    `may_strike`: whether it may be struck at a place now; otherwise it is the next time.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        return
    drawn = [Strike(**each) for each in json.loads(Path(named, "strikes.json").read_text())]
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
        (folder / "struck" / strike.mark).touch()
        if strike.kind == "full":
            with _full_disk(folder / "out"):
                return method(*given, **named)
        _strike(strike.kind)
        return method(*given, **named)

    return watched


@contextmanager
def _full_disk(directory: Path) -> Iterator[None]:
    """The largest file of the result directory, its checkpoint, cannot be written again: this process's files end at
    half of its size, with another of the system's errors than on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in directory.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def arm_server(index: int) -> None:
    """Have this process, a server with copies, struck; it writes down which gradients are part of each copy."""
    arm(f"server-{index}", SERVER_PLACES)
    if VARIABLE not in os.environ:
        return
    note, repeat = Replication._note, Replication._repeat
    counted = Path(os.environ[VARIABLE], "counted", f"server-{index}").open("ab", buffering=0)  # noqa: SIM115

    def write(copy: Replication, shard: int, gradients: Iterable[tuple[int, int]]) -> None:
        for worker, clock in gradients:
            counted.write(f"{copy.key_range} {shard} {worker} {clock}\n".encode())

    @functools.wraps(note)
    def noted(copy: Replication, shard: int, closed: Closed) -> None:
        write(copy, shard, ((worker, clock) for worker, (clock, _) in closed.contributors.items()))
        note(copy, shard, closed)

    @functools.wraps(repeat)
    def repeated(copy: Replication, entry: Message) -> None:
        repeat(copy, entry)
        write(copy, entry.shard, ((worker, clock) for worker, clock, _ in entry.body.get("contributors", ())))

    setattr(Replication, "_note", noted)  # noqa: B010 - a method is not to be assigned
    setattr(Replication, "_repeat", repeated)  # noqa: B010


def can_cut() -> bool:
    """Whether this process may have the kernel close connections, tried on one of its own: it takes CAP_NET_ADMIN,
    iproute2's `ss`, and a kernel with INET_DIAG_DESTROY."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as own:
        try:
            _cut([(own.getsockname(), own.getpeername())])
            own.sendall(b".")
        except OSError as error:
            return isinstance(error, ConnectionError)
    return False


def own_connections() -> list[tuple[Address, Address]]:
    """This process's, but for Ray's, which are IPv6 sockets: Ray ends a process that it cannot reach."""
    connections = psutil.Process().net_connections("tcp4")
    return [(each.laddr, each.raddr) for each in connections if each.status == psutil.CONN_ESTABLISHED]


def _cut(connections: Sequence[tuple[Address, Address]]) -> None:
    """Breaks connections as a network would: both ends hear of it, and messages under way are lost."""
    for (host, port), (peer, peer_port) in connections:
        ends = ["src", f"{host}:{port}", "dst", f"{peer}:{peer_port}"]
        subprocess.run(["ss", "--kill", "--tcp", "--numeric", *ends], capture_output=True, check=False)


def _strike(kind: Kind) -> None:
    if kind == "hold":
        ctypes.PyDLL(None).sleep(HELD_S)
        return
    if kind == "cut":
        _cut(own_connections())
        return
    if kind == "pause":
        subprocess.Popen(["sh", "-c", f"sleep {PAUSED_S}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), _SIGNALS[kind])
