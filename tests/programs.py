"""Programs of tests, run in forks of a server that has loaded what they import: 5 s of a core less for each.

The servers are `tests/program_forks.py`. This file is also a program: what it is given is run in a fork, and it ends
with the same status. It imports the standard library alone, since it stands in for programs that start by the hundred.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESS = "PACELINE_TEST_FORKS"
"""Names a server's socket, for the processes of a test session."""
RUNS_FORKS = "PACELINE_FORKS"
"""Says whether each run has a server of forks of its own, which costs what the one here does."""
_OF_WORKERS = "-workers"
"""Behind that name: the socket of the server that workers of Ray's are forks of."""
READY = b"ready\n"
"""What the server with Ray says when it may be asked."""
_HERE = Path(__file__)
_ROOM = "x" * 60_000  # in which forks show the environment that they were given


class Program:
    """A fork that runs a Python program, with `subprocess.Popen`'s words. It ends when nobody holds this any more."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        directory: str | Path,
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        is_rays_worker: bool = False,
    ) -> None:
        """
        Args:
            arguments: a Python program's file, or `-m` and a module; and its own arguments.
        """
        self.returncode: int | None = None
        asked = {"arguments": list(arguments), "directory": str(directory), "environment": dict(environment)}
        told = json.dumps(asked).encode()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[ADDRESS] + (_OF_WORKERS if is_rays_worker else ""))
        socket.send_fds(self._connection, [len(told).to_bytes(4, "big")], list(streams))
        self._connection.sendall(told)
        self.pid = self._number()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its status, as of a Popen; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._connection.settimeout(None if timeout is None else max(timeout, 1e-3))
            try:
                self.returncode = self._number()
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To the program, unless it has ended: then another process may have its number."""
        if self.returncode is None and not self._has_news():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_news(self) -> bool:
        """Whether its status is there to be read. It stays there: a signal's handler may ask while `wait` goes on."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def _number(self) -> int:
        told = self._connection.recv(4, socket.MSG_WAITALL)
        if len(told) < 4:
            raise RuntimeError("the server of forks has ended")
        return int.from_bytes(told, "big", signed=True)


@contextmanager
def served() -> Iterator[str]:
    """Meanwhile programs may be forked, by this process and those that it starts.

    Gives a folder for PATH with a `paceline`, a `ray` and a `python` that run in forks. Programs that still run in the
    end are killed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-test-forks-") as folder:
        address = os.path.join(folder, "socket")
        _write_stand_ins(Path(folder, "bin"))
        with socket.socket(socket.AF_UNIX) as programs, socket.socket(socket.AF_UNIX) as workers:
            for door, name in ((programs, address), (workers, address + _OF_WORKERS)):
                door.bind(name)
                door.listen(64)
            server = _start(programs, workers)
        os.environ |= {ADDRESS: address, RUNS_FORKS: "off"}
        try:
            yield os.path.join(folder, "bin")
        finally:
            del os.environ[ADDRESS], os.environ[RUNS_FORKS]
            server.communicate()


def _write_stand_ins(folder: Path) -> None:
    python = shlex.quote(sys.executable)
    fork = f"exec {python} -S -E {shlex.quote(str(_HERE))}"
    paceline, ray = (shlex.quote(str(Path(sys.executable).with_name(name))) for name in ("paceline", "ray"))
    texts = {
        "paceline": f'{fork} {paceline} "$@"',
        "ray": f'{fork} {ray} "$@"',
        "python": f'[ "$1" = -u ] && shift && export PYTHONUNBUFFERED=1\ncase "$1" in\n'
        f'*.py|-m) {fork} "$@" ;;\n*) exec {python} "$@" ;;\nesac',
    }
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def _start(*doors: socket.socket) -> subprocess.Popen[bytes]:
    """The servers; they end with their standard input.

    This returns once the one with Ray may be asked: Ray's node manager, which a test may start next, waits 15 s for its
    agents and no longer, which are forks of it.
    """
    command = [sys.executable, str(_HERE.with_name("program_forks.py"))]
    path = os.pathsep.join([str(_HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "ROOM": _ROOM}
    server = subprocess.Popen(
        [*command, *(str(door.fileno()) for door in doors)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[door.fileno() for door in doors],
        start_new_session=True,
    )
    assert server.stdout is not None
    with server.stdout as told:
        is_ready = told.readline() == READY
    if not is_ready:
        server.kill()
        raise RuntimeError("the servers of forks did not start")
    return server


def main() -> None:
    """Stand in for a program: signals are passed on to it, and this ends as it does."""
    passed_on = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # one that comes before there is a program waits for it
    program = Program(sys.argv[1:], directory=os.getcwd(), environment=os.environ, streams=(0, 1, 2))
    for each in passed_on:
        signal.signal(each, lambda number, _: program.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    status = program.wait()
    if status < 0:
        for each in passed_on:
            signal.signal(each, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
