"""Hosts as Horovod's launcher takes them, and one script on all of them: here directly, elsewhere over ssh.

Every process is `python -m paceline.horovod.remote` at this interpreter's path. What it runs goes through its input,
so that no shell reads it; the input's end tells it that the launcher is gone (`remote.py`).
"""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TextIO, final

from paceline.engines.scripting import Script
from paceline.errors import RunFailed, UsageError

_SSH = "ssh"
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=10")
_LEAVE_WITHIN_S = 10.0
_LOOK_S = 0.1


class Host(NamedTuple):
    name: str
    slots: int


def parse_hosts(texts: Iterable[str]) -> list[Host]:
    """Hosts of `name:slots`, without `:slots` one. Raises UsageError for another form, and for a host named twice."""
    hosts = []
    for text in texts:
        name, _, count = text.strip().partition(":")
        if not name or (count and not count.isdigit()) or count == "0":
            raise UsageError(f"{text!r} is not of the form host:slots")
        if name.startswith("-") or len(name.split()) > 1:  # ssh would take it for an option of its own
            raise UsageError(f"{name!r} is no name of a host")
        hosts.append(Host(name, int(count or 1)))
    twice = [name for name, times in Counter(host.name for host in hosts).items() if times > 1]
    if twice:
        raise UsageError(f"host {twice[0]} is named twice; give it once, with all of its slots")
    return hosts


def is_here(name: str) -> bool:
    """Whether a host's name is this one's."""
    return name in {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}


def places_of(hosts: Sequence[Host], num_proc: int) -> list[tuple[Host, dict[str, int]]]:
    """Each rank's host and variables, host by host as they are named. Raises UsageError if there are too few slots."""
    slots = sum(host.slots for host in hosts)
    if num_proc > slots:
        raise UsageError(f"-np {num_proc} is more than the {slots} slots of the hosts")
    filled, left = [], num_proc
    for host in hosts:
        filled.append((host, min(host.slots, left)))
        left -= filled[-1][1]
    found: list[tuple[Host, dict[str, int]]] = []
    for number, (host, count) in enumerate(filled):
        for local_rank in range(count):
            place = {
                "RANK": len(found),
                "WORLD_SIZE": num_proc,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": count,
                "CROSS_RANK": sum(other > local_rank for _, other in filled[:number]),
                "CROSS_SIZE": sum(other > local_rank for _, other in filled),
            }
            found.append((host, place))
    return found


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


@final
class Launch:
    """One script on some hosts.

    Args:
        variables: the environment of every process, besides its own host's.
        start_within_s: until when every host has to answer, and ranks have to meet.
    """

    def __init__(
        self,
        script: Script,
        hosts: Sequence[Host],
        *,
        num_proc: int,
        variables: Mapping[str, str],
        ssh: Ssh,
        start_within_s: float,
    ) -> None:
        self._script, self._variables, self._ssh = script, variables, ssh
        self._start_within_s = start_within_s
        self._places = places_of(hosts, num_proc)
        self._processes: list[subprocess.Popen[str]] = []
        self._copying: list[threading.Thread] = []
        self._output = threading.Lock()

    def run(self) -> None:
        """Run the script on every rank, with their output here. Returns once all have ended.

        Raises:
            RunFailed: a host cannot be reached, or a rank fails, which ends the others.
        """
        try:
            for host, _ in self._places:
                self._processes.append(self._start(host.name))
            meeting_point = self._hear_hellos()
            for (host, place), process in zip(self._places, self._processes, strict=True):
                self._tell(process, host.name, place, meeting_point)
            self._watch()
        finally:
            self._end()

    def _start(self, host: str) -> "subprocess.Popen[str]":
        command = _worker() if is_here(host) else self._ssh.command(host)
        try:
            return subprocess.Popen(
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

    def _hear_hellos(self) -> Mapping[str, Any]:
        """Where ranks meet: what the first one says of itself, once all have answered."""
        late = threading.Timer(self._start_within_s, self._give_up)
        late.start()
        try:
            hellos = [self._hello(rank) for rank in range(len(self._places))]
        finally:
            late.cancel()
        return hellos[0]

    def _hello(self, rank: int) -> dict[str, Any]:
        process, host = self._processes[rank], self._places[rank][0].name
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("{"):  # what the host's shell may say comes before
                hello: dict[str, Any] = json.loads(line)
                return hello
        said = process.stderr.read().strip()
        said = said or f"status {process.wait()}"
        raise RunFailed(
            f"host {host} did not start a worker within {self._start_within_s:g} s: {said}. Does "
            f"`{shlex.join(self._ssh.command(host)[:-1])} true` work without a password, and is {sys.executable} there?"
        )

    def _tell(
        self, process: "subprocess.Popen[str]", host: str, place: Mapping[str, int], meeting_point: Mapping[str, Any]
    ) -> None:
        first = self._places[0][0].name.rpartition("@")[2]
        address = meeting_point["address"] if is_here(first) else first
        variables = {
            **self._variables,
            **{name: str(value) for name, value in place.items() if not name.startswith("CROSS")},
            **{f"HOROVOD_{name.replace('WORLD_SIZE', 'SIZE')}": str(value) for name, value in place.items()},
            "HOROVOD_HOSTNAME": host,
            "TORCHELASTIC_RUN_ID": "horovodrun",
            "MASTER_ADDR": "127.0.0.1" if all(is_here(each.name) for each, _ in self._places) else address,
            "MASTER_PORT": str(meeting_point["port"]),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(self._start_within_s),
        }
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already: `_watch` tells
            process.stdin.write(json.dumps({"variables": variables, "script": asdict(self._script)}) + "\n")
            process.stdin.flush()
        for source, target, name in ((process.stdout, sys.stdout, "stdout"), (process.stderr, sys.stderr, "stderr")):
            assert source is not None
            label = f"[{place['RANK']}]<{name}>:"
            thread = threading.Thread(target=self._copy, args=(source, target, label), daemon=True)
            thread.start()
            self._copying.append(thread)

    def _copy(self, source: TextIO, target: TextIO, label: str) -> None:
        for line in source:
            with self._output:
                target.write(f"{label}{line}")
                target.flush()

    def _watch(self) -> None:
        """Wait for all. Raises RunFailed, which names the first rank to fail and its host."""
        running = dict(enumerate(self._processes))
        while running:
            for rank, process in [*running.items()]:
                try:
                    status = process.wait(_LOOK_S / len(running))
                except subprocess.TimeoutExpired:
                    continue
                del running[rank]
                if status != 0:
                    raise RunFailed(f"rank {rank} on {self._places[rank][0].name} ended with status {status}")

    def _give_up(self) -> None:
        """Have reading the hellos end."""
        for process in self._processes:
            process.kill()

    def _end(self) -> None:
        """Whoever still runs is told by the end of its input; who does not leave in time is ended."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):  # it is gone
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_LEAVE_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._copying:
            thread.join(_LEAVE_WITHIN_S)
