"""Workers of a test's Ray cluster, forked from a process that has loaded what they import: 4 s of a core less for each.

Ray's node manager is told to start its workers by this file. The first that it starts makes the server, which ends
with the node manager; each asks the server for a fork, in which Ray's own program runs, and waits for that one's end.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress

NODE = {"setup_worker_path": __file__}
"""For `head_node_args` of `ray.cluster_utils.Cluster`."""
_START_S = 60.0
_LOOK_S = 0.5


def main() -> None:
    manager = int(os.environ["RAY_RAYLET_PID"])
    address = f"\0paceline-test-ray-forks-{manager}"
    until_s = time.monotonic() + _START_S
    while True:
        with suppress(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as asking:
            asking.connect(address)
            if _is_ours(asking):
                return _ask(asking)
        if time.monotonic() > until_s:
            sys.exit("the server of forks does not start")
        _start_server(address, manager)
        time.sleep(0.02)


def _ask(asking: socket.socket) -> None:
    told = json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    socket.send_fds(asking, [len(told).to_bytes(4, "big")], [0, 1, 2])
    asking.sendall(told)
    with suppress(ConnectionResetError):
        asking.recv(1)  # until the worker, who has the other end, has ended


def _start_server(address: str, manager: int) -> None:
    """In a process of its own; where another has the address, it is the one that will answer."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(address)
        except OSError:
            return
        if os.fork() == 0:
            os.setsid()
            _serve(server, manager)
            os._exit(0)


def _serve(server: socket.socket, manager: int) -> None:
    import torch._dynamo  # noqa: F401

    import paceline.engines.ray.server_actor
    import paceline.engines.ray.worker_actor  # noqa: F401

    server.listen(64)
    server.settimeout(_LOOK_S)
    while _lives(manager):
        with suppress(TimeoutError):
            asking, _ = server.accept()
            with asking:
                if _is_ours(asking) and os.fork() == 0:
                    server.close()
                    _become_worker(asking)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is of this user: such addresses are anybody's."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.geteuid()


def _lives(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def _become_worker(asking: socket.socket) -> None:
    """What Ray's setup_worker.py does, and the program that it gives its place to."""
    import numpy as np
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker

    os.setsid()  # Ray ends a worker's whole process group
    asking.settimeout(None)
    length, streams, *_ = socket.recv_fds(asking, 4, 3)
    told = b""
    while len(told) < int.from_bytes(length, "big"):
        more = asking.recv(1 << 20)
        if not more:
            os._exit(1)  # whoever asked has ended
        told += more
    said = json.loads(told)
    for stream, own in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, own)
        os.close(stream)
    given, sys.argv = setup_worker.parser.parse_known_args(said["arguments"])
    os.chdir(said["directory"])
    os.environ.clear()
    os.environ.update(said["environment"])
    os.environ.update(RuntimeEnvContext.deserialize(given.serialized_runtime_env_context or "{}").env_vars)
    np.random.seed()  # as in a process of its own
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path[0] = os.path.dirname(sys.argv[0])
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
