"""The launcher's side of forks: it starts their server, and has Ray ask that one for its processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ray._private.parameter import RayParams

from paceline.engines.ray.forks import stand_in

_SWITCH, _OFF = "PACELINE_FORKS", "off"
_THREADS = "OMP_NUM_THREADS"


@contextmanager
def served(directory: Path) -> Iterator[str | None]:
    """A server of forks, which ends with this, and with this process. Gives the address of its socket, or none where
    the environment says that there are to be no forks.

    Args:
        directory: where nobody else can enter.
    """
    if os.environ.get(_SWITCH) == _OFF:
        yield None
        return
    address = str(directory / "forks")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "paceline.engines.ray.forks.server", str(door.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[door.fileno()],
            # As Ray gives its processes. A worker then says how many threads torch has.
            env={_THREADS: "1", **os.environ},
            start_new_session=True,  # a Ctrl-C is the launcher's alone
        )
    try:
        yield address
    finally:
        server.kill()  # the kernel ends the forks with it
        server.communicate()


@contextmanager
def asked_by_ray(address: str | None) -> Iterator[None]:
    """A Ray that is started meanwhile has its processes from the server there; none: it starts them itself."""
    with nullcontext() if address is None else _asked_by_ray(address):
        yield


@contextmanager
def _asked_by_ray(address: str) -> Iterator[None]:
    as_ever: Any = RayParams.update_if_absent

    def update_if_absent(self: RayParams, **settings: object) -> None:
        if "setup_worker_path" in settings:
            settings["setup_worker_path"] = stand_in.__file__
        as_ever(self, **settings)

    RayParams.update_if_absent = update_if_absent  # type: ignore[method-assign]
    os.environ[stand_in.ADDRESS] = address
    try:
        yield
    finally:
        RayParams.update_if_absent = as_ever  # type: ignore[method-assign]
        del os.environ[stand_in.ADDRESS]
