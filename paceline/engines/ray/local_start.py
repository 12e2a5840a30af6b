"""The start of a Ray on this machine, which a busy or a slow one may need twice."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import services
from ray._private.parameter import RayParams

_TOO_LATE = "timed out during startup"  # Ray's words
_GIVE_UP_S = 10.0


_LEFT_OUT = {"no_monitor": True, "include_log_monitor": False}


def start_local(directory: Path, settings: Mapping[str, object], **options: Any) -> None:
    """Start a Ray that has its files in `directory`, and connect to it.

    Args:
        settings: what Ray's node is to have in place of its own, as Ray's `RayParams` names it.
        options: for `ray.init`.

    Ray's node manager ends itself where its agents take more than 15 s to start (ray-project/ray, issue 65983), as they
    may on a busy machine, or when a slow disk reads them for the first time. Ray is then started once more.

    Raises:
        TimeoutError: it was late again.
    """
    for is_last in (False, True):
        try:
            with _changed(settings):
                ray.init(address="local", _temp_dir=str(directory), include_dashboard=False, **options)
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


@contextlib.contextmanager
def _changed(settings: Mapping[str, object]) -> Iterator[None]:
    """A Ray that is started meanwhile leaves out what nothing of a run's asks: what scales a cluster, what sends output
    of workers to drivers, and the dashboard's server, for which Ray's start would wait. That is 3 s of a core less."""
    params: Any = RayParams.update_if_absent
    serve = services.start_api_server

    def update_if_absent(self: RayParams, **given: object) -> None:
        if "setup_worker_path" in given:  # a node's settings
            for name, value in {**_LEFT_OUT, **settings}.items():
                setattr(self, name, value)
        params(self, **given)

    RayParams.update_if_absent = update_if_absent  # type: ignore[method-assign]
    services.start_api_server = lambda *_, **__: (None, None)
    try:
        yield
    finally:
        RayParams.update_if_absent = params  # type: ignore[method-assign]
        services.start_api_server = serve


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
