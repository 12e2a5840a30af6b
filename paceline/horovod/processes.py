"""The processes of a launcher's workers: each at one host, here directly, elsewhere over ssh.

Every one is `python -m paceline.horovod.remote` at this interpreter's path. What it runs goes through its input, so
that no shell reads it; the input's end tells it that the launcher is gone (`remote.py`).
"""

import base64
import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO, final

import cloudpickle

from paceline.engines.scripting import Program, Script
from paceline.errors import RunFailed
from paceline.horovod.hosts import is_here
from paceline.horovod.line import LEAVE_WITHIN_S, Unframer
from paceline.records import EventRecord

_SSH = "ssh"
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=10")
_LEAVE_WITHIN_S = 3 * LEAVE_WITHIN_S  # a command that hears neither the line nor SIGTERM takes two of them
_output = threading.Lock()


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached."""

    port: int | None = None
    identity_file: str | None = None

    def command(self, host: str) -> list[str]:
        """What starts a process there; PACELINE_SSH may say it in other words, as in `ssh -F FILE`."""
        own = shlex.split(os.environ.get("PACELINE_SSH", _SSH))
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity_file is None else ["-i", self.identity_file]
        return [*own, *_SSH_OPTIONS, *port, *identity, host, f"exec {shlex.join(_worker())}"]


def _worker() -> list[str]:
    return [sys.executable, "-u", "-m", "paceline.horovod.remote"]


@dataclass(frozen=True)
class Command:
    """Anything but a Python script, by the words of its command line; every host has to have it."""

    words: tuple[str, ...]
    working_directory: str
    may_alias: bool = True
    """Paceline may stand in for Horovod in its processes."""


@dataclass(frozen=True)
class Job:
    """What all workers run."""

    program: Program | Command
    variables: Mapping[str, str] = field(default_factory=dict)
    start_within_s: float = 300.0
    """The time within which every host has to answer, and ranks have to meet."""
    is_elastic: bool = False
    keep: Callable[[int, list[list[Any]]], None] | None = None
    """Takes a worker's number and its records; none: workers do not record."""
    note: Callable[[EventRecord], None] = lambda event: None
    """Takes what the launcher itself records of the job."""

    def hear(self, worker: int, results: dict[int, str]) -> dict[str, Callable[..., None]]:
        """What becomes of a worker's messages, by their kind: what its function returns is put among `results`."""

        def keep(records: list[list[Any]]) -> None:
            if self.keep is not None:
                self.keep(worker, records)

        return {"result": lambda value: results.update({worker: value}), "records": keep}

    def as_plain(self) -> dict[str, Any]:
        if isinstance(self.program, Command):
            return {"command": asdict(self.program)}
        if isinstance(self.program, Script):
            return {"script": asdict(self.program)}
        function = base64.b64encode(cloudpickle.dumps(self.program)).decode()
        return {"function": function, "path": [os.path.abspath(folder) for folder in sys.path if folder]}


@final
class WorkerProcess:
    """One of them, from its start on. Raises RunFailed if there is no ssh."""

    def __init__(self, host: str, ssh: Ssh) -> None:
        self.host = host
        self._ssh, self._mark = ssh, secrets.token_hex(8)
        command = _worker() if is_here(host) else ssh.command(host)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the launcher, which ends them in order
            )
        except OSError as error:
            raise RunFailed(f"cannot start {command[0]} for host {host}: {error.strerror}") from None
        self._copying: list[threading.Thread] = []

    def hello(self) -> dict[str, Any] | None:
        """What it says of itself once it is there: its address, and a free port. None if it has ended before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # what the host's shell may say comes before
                hello: dict[str, Any] = json.loads(line)
                return hello
        return None

    def why_not(self, within_s: float) -> str:
        """What to tell of one that has ended without a hello."""
        assert self._process.stderr is not None
        said = self._process.stderr.read().strip() or f"status {self._process.wait()}"
        return (
            f"host {self.host} did not start a worker within {within_s:g} s: {said}. Does "
            f"`{shlex.join(self._ssh.command(self.host)[:-1])} true` work without a password, and is {sys.executable} "
            "there?"
        )

    def give(self, job: Job, variables: Mapping[str, str]) -> None:
        """Have it run the job, with variables of its own."""
        own = {
            **job.variables,
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(job.start_within_s),
            **({"HOROVOD_ELASTIC": "1"} if job.is_elastic else {}),
            **variables,
        }
        about = {"mark": self._mark, "is_elastic": job.is_elastic, "is_recorded": job.keep is not None}
        self.tell({"variables": own, **about, **job.as_plain()})

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone, or told to go: its end tells
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def listen(self, label: Callable[[], str], hear: Mapping[str, Callable[..., None]]) -> None:
        """Copy its output from here on, each line behind its label, and hear its messages, each by its kind."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        messages = Unframer(self._mark, lambda said: hear[said.pop("kind")](**said))
        for name, source, target in (
            ("stdout", self._process.stdout, sys.stdout), ("stderr", self._process.stderr, sys.stderr)
        ):  # fmt: skip
            about = (source, target, name, label, messages if name == "stdout" else None)
            thread = threading.Thread(target=_copy, args=about, daemon=True)
            thread.start()
            self._copying.append(thread)

    def wait(self, within_s: float | None = None) -> int | None:
        """The status once it has ended; None if it goes on for longer."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()

    def leave(self) -> None:
        """Tell it to go, by the end of its input."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone
                self._process.stdin.close()

    def end(self) -> None:
        """Wait for one that was told to go, and for its last words; if it does not in time, end it."""
        if self.wait(_LEAVE_WITHIN_S) is None:
            self.kill()
            self.wait()
        for thread in self._copying:
            thread.join(_LEAVE_WITHIN_S)
        if not self._copying:
            for output in (self._process.stdout, self._process.stderr):
                assert output is not None
                output.close()


def value_of(text: str) -> Any:
    """What a worker's function has returned. It is a process of the launcher's own that says so."""
    return cloudpickle.loads(base64.b64decode(text))


def _copy(source: TextIO, target: TextIO, name: str, label: Callable[[], str], messages: Unframer | None) -> None:
    has_told = False
    with source:
        for line in source:
            try:
                own = line if messages is None else messages.output_of(line)
            except Exception as error:  # whatever the worker says, it is not to wait for somebody who reads
                own = ""
                if not has_told:
                    _write(sys.stderr, "stderr", label, f"a message of this worker's cannot be read: {error!r}\n")
                has_told = True
            if own:
                _write(target, name, label, own)
    if messages is not None and (rest := messages.rest()):
        _write(target, name, label, f"{rest}\n")


def _write(target: TextIO, name: str, label: Callable[[], str], line: str) -> None:
    with _output:
        target.write(f"[{label()}]<{name}>:{line}")
        target.flush()
