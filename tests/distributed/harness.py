"""Starting commands as a user does, and looking at what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import programs
from tests.programs import Program

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train.py"
PACELINE = str(Path(sys.executable).parent / "paceline")
PATIENCE_S = 300.0
"""For what comes at once where nothing else runs. No test measures by it: it ends those that would wait for ever."""
GRACE_S = 60.0
AGENTS_GRACE_S = 90.0
"""Ray's own agents, if they were just starting when all was killed, look for a Ray that is gone for a minute."""
_AGENTS = ("ray/dashboard/agent.py", "ray/_private/runtime_env/agent", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
COLD = {programs.ADDRESS: "", programs.RUNS_FORKS: ""}
"""For the environment of a command that loads what it uses itself; its Ray's workers are forks of its own server."""
_TAG = "PACELINE_TEST_TAG"


@dataclass
class Command:
    """A command in a session of its own, whose processes are known by a variable of their environment."""

    arguments: Sequence[str]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tag = uuid.uuid4().hex
        self.shared_memory_before = shared_memory()
        self._output = (self.directory / f"output-{self.tag}").open("w+")
        self.process = self._started({**os.environ, **self.environment, _TAG: self.tag})

    def _started(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | Program:
        """`paceline` itself and a file of Python's are forked, unless they are to start `COLD`; every other program
        starts as ever."""
        is_python = self.arguments[0] == PACELINE or self.arguments[0].endswith(".py")
        if is_python and environment.get(programs.ADDRESS):
            with open(os.devnull) as nothing:
                streams = (nothing.fileno(), self._output.fileno(), self._output.fileno())
                return Program(self.arguments, directory=self.directory, environment=environment, streams=streams)
        return subprocess.Popen(
            self.arguments,
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Tests that run in the background of a shell ignore interrupts, and the command would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait(self, *, timeout_s: float = 2 * PATIENCE_S) -> str:
        """The output, once the command has ended."""
        self.process.wait(timeout=timeout_s)
        self._output.seek(0)
        return self._output.read()

    def says(self, text: str) -> bool:
        """Whether it has printed that in time."""
        return wait_until(lambda: text in Path(self._output.name).read_text())

    @property
    def status(self) -> int | None:
        return self.process.returncode

    def interrupt(self) -> None:
        """As Ctrl-C in its terminal: the whole process group hears it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> list[str]:
        """Its processes that still run, the command itself included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_its_own = process.environ().get(_TAG) == self.tag
                if is_its_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:300]}")
        return found

    def assert_nothing_left(self, *, within_s: float = GRACE_S) -> None:
        def own() -> list[str]:
            return [line for line in self.processes() if not any(agent in line for agent in _AGENTS)]

        assert wait_until(lambda: not own(), within_s=within_s), f"processes are left: {own()}"
        assert wait_until(lambda: not self.processes(), within_s=AGENTS_GRACE_S), f"agents are left: {self.processes()}"
        names = shared_memory_left(self.shared_memory_before, within_s=within_s)
        assert not names, f"shared memory is left: {names}"

    def close(self) -> None:
        """End whatever a failed test left."""
        for line in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        self.process.wait(timeout=PATIENCE_S)
        self._output.close()


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[Callable[..., Command]]:
    """Starts `paceline` (or another program) with arguments in that directory; in the end nothing is left of it."""
    commands: list[Command] = []

    def started(*arguments: object, program: str = PACELINE, **environment: str) -> Command:
        command = Command([program, *map(str, arguments)], directory, environment)
        commands.append(command)
        return command

    try:
        yield started
    finally:
        for command in commands:
            command.close()


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def _unowned(names: set[str]) -> set[str]:
    """Without those that a living process has mapped: what a dead one left is mapped by nobody."""
    for process in psutil.process_iter() if names else ():
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in maps}
    return names


def shared_memory_left(before: set[str], *, within_s: float = GRACE_S) -> set[str]:
    """What is there since then, is mapped by nobody, and stays; what comes from now on is of tests beside this one."""
    left = shared_memory() - before

    def is_clean() -> bool:
        left.intersection_update(_unowned(left & shared_memory()))
        return not left

    wait_until(is_clean, within_s=within_s)
    return left


def wait_until(is_so: Callable[[], Any], *, within_s: float = PATIENCE_S) -> bool:
    """Whether it became so in time."""
    until_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def events(directory: Path) -> list[dict[str, Any]]:
    path = directory / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def pids(directory: Path) -> dict[str, int]:
    """The members' process ids, by name."""
    return dict(next(event["details"]["pids"] for event in events(directory) if event["name"] == "started"))


def num_steps(directory: Path) -> int:
    """Which are recorded, of all workers; those of the last half second may not be yet."""
    path = directory / "steps.csv"
    return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0


def is_training(directory: Path) -> bool:
    return any(event["name"] == "training" for event in events(directory))
