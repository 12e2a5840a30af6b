"""A run that is started as users start it, with --detach, so that its launcher can be struck."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline import durable
from paceline.checkpoint import FILE_NAME
from paceline.checkpoint_files import CheckpointFiles
from paceline.engines import requests, striking
from paceline.engines.ray.controller import Controller
from paceline.engines.striking import Place
from paceline.errors import RunFailed

WRITES = "writes a checkpoint"
PLACES: Mapping[str, Place] = {
    "hears its members": (Controller, "turn"),
    WRITES: (CheckpointFiles, "_write"),
    "gives a written file its name": (durable, "replace"),
}
_COMMAND = (sys.executable, "-c", "from paceline.cli import main; main()")


def arm(directory: Path) -> None:
    """Have this process, a detached run's launcher, struck once there is a checkpoint to go on from."""
    striking.arm("launcher", PLACES, may_strike=lambda place: (directory / FILE_NAME).exists())


def run(arguments: Sequence[str], *, out: Path, patience_s: float) -> None:
    """Until it has ended. Raises RunFailed, with what its commands say, unless each of them ends well and in time."""
    try:
        _tell("run", "--detach", "--out", str(out), *arguments, patience_s=patience_s)
        _tell("attach", str(out), patience_s=patience_s)
    finally:
        end(out)


def end(out: Path) -> None:
    """At once, whoever still keeps the run in this directory: the guard first, which would start another launcher."""
    for process_of in (requests.guard_of, requests.launcher_of):
        if out.exists() and (process := process_of(out)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _tell(*command: str, patience_s: float) -> None:
    try:
        done = subprocess.run(
            [*_COMMAND, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience_s
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"paceline {command[0]} has not ended after {patience_s:g} s") from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise RunFailed(f"paceline {command[0]} ended with {done.returncode}: {said[-1000:]}")
