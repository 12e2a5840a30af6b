"""What users ask of a run that is under way, from another terminal of the launcher's host."""

import contextlib
import json
import os
import selectors
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from paceline.errors import PacelineError, UsageError

_MOST_BYTES = 1 << 16
_PATIENCE_S = 0.5  # the launcher waits so long for a request that has begun to come
_ANSWER_S = 30.0
_CREDENTIALS = struct.Struct("3i")


@final
class Desk:
    """The launcher's end: a socket without a file, which goes with the process.

    Its name follows from the result directory, whatever path leads there. Users other than its own are sent away.

    Args:
        answer: what is said to a request; it raises PacelineError where that is a refusal.
        is_guard: this is the process that guards the launcher, which is asked where there is none.
    """

    def __init__(self, directory: Path, answer: Callable[[Mapping[str, Any]], str], *, is_guard: bool = False) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._selector = selectors.DefaultSelector()
        with contextlib.suppress(OSError):  # somebody has the name: this run then hears nobody
            self._socket.bind(_name(directory, is_guard=is_guard))
            self._socket.listen()
            self._socket.setblocking(False)
            self._selector.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        return self._selector.fileno()

    def turn(self) -> None:
        """Answer who has come; waits for nobody."""
        while self._selector.select(0):
            with contextlib.suppress(OSError, ValueError):
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(_PATIENCE_S)
                    if _user_of(connection) == os.geteuid():
                        connection.sendall(json.dumps(self._said(_read(connection))).encode() + b"\n")

    def close(self) -> None:
        self._selector.close()
        self._socket.close()

    def _said(self, request: Mapping[str, Any]) -> dict[str, str]:
        try:
            return {"said": self._answer(request)}
        except PacelineError as refusal:
            return {"refused": str(refusal)}


def ask(directory: Path, request: Mapping[str, Any]) -> str:
    """What the launcher of the run in this directory answers. Raises UsageError if there is none, or it refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            try:
                connection.connect(_name(directory))
            except ConnectionRefusedError:
                connection.connect(_name(directory, is_guard=True))
            is_own = _user_of(connection) == os.geteuid()
            if is_own:
                connection.sendall(json.dumps(request).encode() + b"\n")
            said = _read(connection) if is_own else {"refused": f"the run in {directory} is another user's"}
        except TimeoutError:
            raise UsageError(f"the launcher of the run in {directory} does not answer; it may be stopped") from None
        except (OSError, ValueError):
            raise UsageError(
                f"no run is under way in {directory}: it has ended, or was started on another host"
            ) from None
    if "refused" in said:
        raise UsageError(str(said["refused"]))
    return str(said.get("said", ""))


def is_under_way(directory: Path) -> bool:
    """Whether a launcher of this host has its run in this directory."""
    return launcher_of(directory) is not None or guard_of(directory) is not None


def require_alone(directory: Path) -> None:
    """Raises UsageError if another run goes on in this directory, but for the guard that has started this process."""
    if launcher_of(directory) is not None or guard_of(directory) not in (None, os.getppid()):
        raise UsageError(f"a run is under way in {directory}; paceline stop {directory} ends it")


def launcher_of(directory: Path) -> int | None:
    """The process of this host that has its run in this directory, if there is one."""
    return _owner_of(_name(directory))


def guard_of(directory: Path) -> int | None:
    """The process of this host that starts another launcher of this run where one is killed, if there is one."""
    return _owner_of(_name(directory, is_guard=True))


def _owner_of(name: str) -> int | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(name)
        except OSError:
            return None
        return _process_of(connection) if _user_of(connection) == os.geteuid() else None


def _name(directory: Path, *, is_guard: bool = False) -> str:
    """The socket's name in the kernel's own list, so that no file is left of it."""
    found = directory.stat()
    return f"\0paceline-{found.st_dev:x}-{found.st_ino:x}{'-guard' if is_guard else ''}"


def _read(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON. Raises ValueError if it is none."""
    raw = b""
    while not raw.endswith(b"\n") and len(raw) < _MOST_BYTES:
        piece = connection.recv(4096)
        if not piece:
            raise ValueError("the line is not whole")
        raw += piece
    read = json.loads(raw)
    if not isinstance(read, dict):
        raise ValueError("a request is a mapping")
    return read


def _process_of(connection: socket.socket) -> int:
    return int(_CREDENTIALS.unpack(_credentials_of(connection))[0])


def _user_of(connection: socket.socket) -> int:
    return int(_CREDENTIALS.unpack(_credentials_of(connection))[1])


def _credentials_of(connection: socket.socket) -> bytes:
    """Process, user and group of the other end, as the kernel knows them."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
