"""How a worker's process comes by its line to the launcher: as it was started with it, or by way of a command."""

import json
import os
from typing import Any

from paceline.errors import UsageError
from paceline.horovod import line as lines
from paceline.horovod import reporting

_VARIABLE = "PACELINE_LAUNCHER_LINE"


def variable(about: dict[str, Any], *, told: int, output: int) -> dict[str, str]:
    """What `connect` looks for in the environment of a process that inherits these two files.

    Args:
        about: as `use` takes it, and the line's `mark`.
    """
    line = {**about, "told": told, "output": output, "are": [_identity(told), _identity(output)]}
    return {_VARIABLE: json.dumps(line)}


def connect() -> None:
    """Have elastic jobs and records of this process use the launcher's line, if a command has brought it here.

    Raises:
        UsageError: some process on the way has closed it.
    """
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return
    about = json.loads(text)
    told, output = about["told"], about["output"]
    if [_identity(told), _identity(output)] != about["are"]:  # also where the script has opened files of its own there
        raise UsageError(
            "the launcher's line does not reach this process, since the one that has started it closes its files; "
            "start it with close_fds=False, or by a shell"
        )
    use(lines.PipeLine(os.fdopen(told, encoding="utf-8"), output, about["mark"]), about)


def use(line: lines.PipeLine, about: dict[str, Any]) -> None:
    """Have this process's elastic job, and its records, use the line, as far as the launcher wants either."""
    if about["is_elastic"]:
        lines.connect(line)
    if about["is_recorded"]:
        reporting.report_over(line)


def _identity(file: int) -> list[int] | None:
    """Which file a number stands for; None if it stands for none."""
    try:
        found = os.fstat(file)
    except OSError:
        return None
    return [found.st_dev, found.st_ino]
