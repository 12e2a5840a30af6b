"""The process that is forked. Each fork becomes the Python program that a stand-in has asked for.

Ray is not loaded here: its core reads once, as it is loaded, which job a worker is for.
"""

import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, final

from paceline.engines.ray.forks.stand_in import FORKED, NUMBER_BYTES
from paceline.engines.ray.liveness import end_with_forker
from paceline.loading import uncollected

_LOADED = (
    *("paceline.training.worker", "paceline.comm.process_group", "paceline.comm.hierarchical", "paceline.nn"),
    *("paceline.comm.servers.service", "paceline.comm.servers.group", "paceline.comm.socket_mailbox", "zmq"),
    *("google.protobuf.json_format", "jsonschema", "requests", "yaml", "msgpack", "filelock"),  # which Ray loads
)
_PATIENCE_S = 5.0
_LAUNCHER = 0  # its end of this pipe is closed when it ends


def main() -> None:
    """Serve at the socket that is the program's first argument, until the launcher ends."""
    with socket.socket(fileno=int(sys.argv[1])) as door:
        with uncollected():
            for name in _LOADED:
                with suppress(ImportError):  # whoever needs it says so
                    import_module(name)
        asked = _Server(door).serve()
    if asked is not None:
        asked.become()


@final
@dataclass(frozen=True)
class _Asked:
    """A program, and where it is to run."""

    about: Mapping[str, Any]
    streams: list[int]
    server: int = field(default_factory=os.getpid)

    @classmethod
    def received(cls, asker: socket.socket) -> "_Asked":
        """Raises OSError or ValueError where the asker has ended meanwhile."""
        asker.settimeout(_PATIENCE_S)
        length, streams, *_ = socket.recv_fds(asker, NUMBER_BYTES, 3)
        try:
            told, left = b"", int.from_bytes(length, "big") if len(streams) == 3 else 0
            while left and (part := asker.recv(left)):
                told, left = told + part, left - len(part)
            return cls(json.loads(told), streams)
        except (OSError, ValueError):
            _close(streams)
            raise

    def become(self) -> NoReturn:
        """Run it in this process, of which nothing but the loaded modules is left."""
        end_with_forker(self.server)
        os.setpgid(0, 0)  # Ray ends a worker's group with the worker
        about = self.about
        for stream, own in zip(self.streams, (0, 1, 2), strict=True):
            os.dup2(stream, own)
        _close(self.streams)
        os.environ.clear()
        os.environ.update(about["environment"])
        os.chdir(about["directory"])
        os.sched_setaffinity(0, about["cores"])
        with suppress(OSError):  # only root may become more urgent than its launcher
            os.setpriority(os.PRIO_PROCESS, 0, about["niceness"])
            Path("/proc/self/oom_score_adj").write_text(about["badness"])
        sys.modules["numpy"].random.seed()  # as in a process of its own; Python's `random` does so itself
        sys.argv = list(about["program"])
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()


@final
class _Server:
    """Tells each asker how its fork has ended, and ends the fork of one that has ended itself."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._forks: dict[int, tuple[int, socket.socket]] = {}  # by the file that tells of its end: process, asker
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ)
        self._selector.register(_LAUNCHER, selectors.EVENT_READ)

    def serve(self) -> _Asked | None:
        """In a fork: what it is to become. In the server: none, once the launcher has ended and each fork by itself, as
        Ray's workers do when Ray has."""
        is_asked = True
        while is_asked or self._forks:
            key = self._selector.select()[0][0]  # one at a time: what is closed here may bear another's number at once
            if key.fd == _LAUNCHER:
                is_asked = False
                self._selector.unregister(_LAUNCHER)
                self._selector.unregister(self._door)
                self._door.close()
            elif key.fd == self._door.fileno():
                asked = self._fork(self._door.accept()[0])
                if asked is not None:
                    return asked
            elif key.fd in self._forks:
                self._ended(key.fd)
            else:
                self._selector.unregister(key.fd)
                os.kill(key.data, signal.SIGKILL)  # a process of this number is there until `_ended` asks for it
        return None

    def _fork(self, asker: socket.socket) -> _Asked | None:
        try:
            asked = _Asked.received(asker)
            process = os.fork()
        except (OSError, ValueError):
            asker.close()
            return None
        if process == 0:
            for file, (_, other) in self._forks.items():
                os.close(file)
                other.close()
            asker.close()
            self._selector.close()
            return asked
        _close(asked.streams)
        asker.setblocking(True)
        end = os.pidfd_open(process)
        self._forks[end] = process, asker
        self._selector.register(end, selectors.EVENT_READ)
        self._selector.register(asker, selectors.EVENT_READ, process)
        with suppress(OSError):
            asker.sendall(FORKED)
        return None

    def _ended(self, file: int) -> None:
        process, asker = self._forks.pop(file)
        self._selector.unregister(file)
        os.close(file)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(KeyError):  # the asker has ended before
            self._selector.unregister(asker)
        with suppress(OSError):
            asker.sendall(status.to_bytes(NUMBER_BYTES, "big", signed=True))
        asker.close()


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
