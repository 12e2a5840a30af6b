"""The launcher's side of forks: it starts their server, and tells Ray to ask that one for its processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.engines.ray.forks import stand_in

_PROGRAM = (
    "import sys; '' in sys.path and sys.path.remove(''); from paceline.engines.ray.forks.server import main; main()"
)
"""It finds no module in the folder where the launcher was called, which may have names of others."""
_SWITCH, _OFF = "PACELINE_FORKS", "off"
_PATIENCE_S = 2.0  # so long forks may take to end once Ray has
_THREADS = "OMP_NUM_THREADS"


@contextmanager
def served(directory: Path) -> Iterator[Mapping[str, object]]:
    """A server of forks, which ends with this, and with this process. Gives the settings of a Ray that has its
    processes from there, and nothing where the environment says that there are to be no forks.

    Args:
        directory: where nobody else can enter.
    """
    if os.environ.get(_SWITCH) == _OFF:
        yield {}
        return
    address = str(directory / "forks")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        server = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(door.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[door.fileno()],
            # As Ray gives its processes. A worker then says how many threads torch has.
            env={_THREADS: "1", **os.environ},
            start_new_session=True,  # a Ctrl-C is the launcher's alone
        )
    os.environ[stand_in.ADDRESS] = address  # which Ray's processes inherit
    try:
        yield {"setup_worker_path": stand_in.__file__}
    finally:
        del os.environ[stand_in.ADDRESS]
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.kill()  # the kernel ends the forks with it
            server.wait()
