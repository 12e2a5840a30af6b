"""A worker that is any command, such as `python -m package` or a shell script, which the job's process stands beside.

What the launcher says goes on to the command through a pipe, by which `hvd.init()` finds its place in whatever Python
process the command starts; what this says goes to the launcher directly.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import RunFailed
from paceline.horovod import line as lines
from paceline.horovod import worker_line

_LOOK_S = 0.05
STAND_IN = Path(__file__).parent / "stand_in"
"""Holds a package `horovod`, for processes that Paceline does not start itself."""


def run_command(words: Sequence[str], told: TextIO, about: dict[str, Any], *, may_alias: bool) -> int:
    """Run it to its end, or to that of `told`; the status that a shell would give.

    Args:
        about: as `worker_line.variable` takes it.
        may_alias: have the command's Python look for Horovod in the stand-in, which knows whether there is another.

    Raises:
        RunFailed: there is no such command here.
    """
    reading, writing = os.pipe()
    output = os.dup(1)
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    variables = {**os.environ, "PATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    variables |= worker_line.variable(about, told=reading, output=output)
    if may_alias:
        variables["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        process = subprocess.Popen(words, env=variables, pass_fds=(reading, output), process_group=0)
    except OSError as error:
        raise RunFailed(f"cannot run {words[0]}: {error.strerror}") from None
    for inherited in (reading, output):
        os.close(inherited)
    is_to_end = threading.Event()
    relay = threading.Thread(target=_relay, args=(told, writing, process, is_to_end), daemon=True)
    relay.start()
    status = process.wait()
    if is_to_end.is_set():
        relay.join()  # what the command has started may go on
    return status if status >= 0 else 128 - status


def _relay(told: TextIO, writing: int, process: "subprocess.Popen[bytes]", is_to_end: threading.Event) -> None:
    """What is told to the command; its end ends the command and all that it has started: who hears it ends in order."""
    for line in told:
        with contextlib.suppress(BrokenPipeError):  # nobody reads it any more
            os.write(writing, line.encode())
    is_to_end.set()
    os.close(writing)
    for ending in (signal.SIGTERM, signal.SIGKILL):
        until_s = time.monotonic() + lines.LEAVE_WITHIN_S
        try:
            while time.monotonic() < until_s:
                os.killpg(process.pid, 0)
                time.sleep(_LOOK_S)
            os.killpg(process.pid, ending)
        except ProcessLookupError:  # all of them have ended
            return
