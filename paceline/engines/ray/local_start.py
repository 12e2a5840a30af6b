"""The start of a Ray on this machine, which a busy or a slow one may need twice."""

import contextlib
from pathlib import Path
from typing import Any

import psutil
import ray

_TOO_LATE = "timed out during startup"  # Ray's words
_GIVE_UP_S = 10.0


def start_local(directory: Path, **options: Any) -> None:
    """Start a Ray that has its files in `directory`, and connect to it.

    Ray's node manager ends itself where its agents take more than 15 s to start (ray-project/ray, issue 65983), as they
    may on a busy machine, or when a slow disk reads them for the first time. Ray is then started once more.

    Raises:
        TimeoutError: it was late again.
    """
    for is_last in (False, True):
        try:
            ray.init(address="local", _temp_dir=str(directory), **options)
            return
        except Exception as error:
            if _TOO_LATE not in str(error):
                raise
            ray.shutdown()
            _end_what_started(directory)
            if is_last:
                raise TimeoutError(
                    "its agents took more than the 15 s that Ray gives them to start, twice; the machine is busy with "
                    "other programs, or its disk is slow"
                ) from error


def _end_what_started(directory: Path) -> None:
    """Ray leaves the processes of a start that failed to the end of this one."""
    started = [child for child in psutil.Process().children() if _is_of(child, directory)]
    for child in started:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(started, timeout=_GIVE_UP_S)


def _is_of(process: psutil.Process, directory: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(str(directory) in argument for argument in process.cmdline())
    return False
