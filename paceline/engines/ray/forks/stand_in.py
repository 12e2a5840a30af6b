"""What Ray's node manager runs in place of Ray's `setup_worker.py`: it asks for a fork, and ends as the fork does.

Where no fork can be had, or Ray asks for a process with an environment of its own, Ray's file has its place. This file
imports the standard library alone, since it is a program that others wait for.
"""

import argparse
import json
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

ADDRESS = "PACELINE_FORKS_AT"
"""The environment variable that names the server's socket."""
FORKED = b"f"
NUMBER_BYTES = 4
FAILED = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    given, program = parser.parse_known_args()
    address = os.environ.pop(ADDRESS, "")
    if address and given.language == "PYTHON" and _is_plain(given.serialized_runtime_env_context, program):
        status = _forked(address, program)
        if status is not None:
            sys.exit(status)
    os.execv(sys.executable, [sys.executable, str(_rays_own()), *sys.argv[1:]])


def _is_plain(context: str, program: list[str]) -> bool:
    """Whether it is a program for this interpreter, in this environment, without options for the interpreter."""
    asked = {name: value for name, value in json.loads(context).items() if value}
    return asked.pop("py_executable", sys.executable) == sys.executable and not asked and program[0].endswith(".py")


def _forked(address: str, program: list[str]) -> int | None:
    """The status with which a fork has ended that became this program; none: there was no fork."""
    try:
        told = json.dumps(
            {
                "program": program,
                "directory": os.getcwd(),  # which may have been removed
                "environment": dict(os.environ),
                "niceness": os.getpriority(os.PRIO_PROCESS, 0),
                "cores": sorted(os.sched_getaffinity(0)),
                "badness": Path("/proc/self/oom_score_adj").read_text(),
            }
        ).encode()
    except OSError:
        return None
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
            socket.send_fds(server, [len(told).to_bytes(NUMBER_BYTES, "big")], [0, 1, 2])
            server.sendall(told)
            if server.recv(1) != FORKED:
                return None
        except OSError:
            return None
        status = server.recv(NUMBER_BYTES, socket.MSG_WAITALL)
        return int.from_bytes(status, "big", signed=True) if len(status) == NUMBER_BYTES else FAILED


def _rays_own() -> Path:
    found = find_spec("ray")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name("_private") / "workers" / "setup_worker.py"


if __name__ == "__main__":
    main()
