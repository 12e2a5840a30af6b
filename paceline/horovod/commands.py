"""A worker that is any command, such as `python -m package` or a shell script, which the job's process stands beside.

What the launcher says goes on to the command through a pipe, by which `hvd.init()` finds its place in whatever Python
process the command starts; what this says goes to the launcher directly.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import RunFailed, UsageError
from paceline.horovod import line as lines
from paceline.horovod import reporting

_VARIABLE = "PACELINE_LAUNCHER_LINE"
STAND_IN = Path(__file__).parent / "stand_in"
"""Holds a package `horovod`, for processes that Paceline does not start itself."""


def run_command(words: Sequence[str], told: TextIO, about: dict[str, Any], *, may_alias: bool) -> int:
    """Run it to its end, or to that of `told`; the status that a shell would give.

    Args:
        about: what `connect` takes.

    Raises:
        RunFailed: there is no such command here.
    """
    reading, writing = os.pipe()
    output = os.dup(1)
    line = {**about, "told": reading, "output": output}
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    variables = {**os.environ, _VARIABLE: json.dumps(line), "PATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    if may_alias and importlib.util.find_spec("horovod") is None:
        variables["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        process = subprocess.Popen(words, env=variables, pass_fds=(reading, output), process_group=0)
    except OSError as error:
        raise RunFailed(f"cannot run {words[0]}: {error.strerror}") from None
    for inherited in (reading, output):
        os.close(inherited)
    threading.Thread(target=_relay, args=(told, writing, process), daemon=True).start()
    status = process.wait()
    return status if status >= 0 else 128 - status


def _relay(told: TextIO, writing: int, process: "subprocess.Popen[bytes]") -> None:
    """What is told to the command; its end ends the command and all that it has started."""
    for line in told:
        with contextlib.suppress(BrokenPipeError):  # nobody reads it any more
            os.write(writing, line.encode())
    os.close(writing)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGTERM)
        threading.Event().wait(lines.LEAVE_WITHIN_S)
        os.killpg(process.pid, signal.SIGKILL)


def connect() -> None:
    """Have elastic jobs and records of this process use the launcher's line, if a command has brought it here.

    Raises:
        UsageError: some process on the way has closed it.
    """
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return
    about = json.loads(text)
    try:
        told = os.fdopen(about["told"], encoding="utf-8")
        os.fstat(about["output"])
    except OSError:
        raise UsageError(
            "the launcher's line does not reach this process, since the one that has started it closes its files; "
            "start it with close_fds=False, or by a shell"
        ) from None
    use(lines.PipeLine(told, about["output"], about["mark"]), about)


def use(line: lines.PipeLine, about: dict[str, Any]) -> None:
    """Have this process's elastic job, and its records, use the line, as far as the launcher wants either."""
    if about["is_elastic"]:
        lines.connect(line)
    if about["is_recorded"]:
        reporting.report_over(line)
