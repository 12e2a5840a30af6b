"""Closes a process's connections, as a network would break them."""

import socket
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil

Address = tuple[str, int]


def lack() -> str:
    """What keeps this process from having the kernel close connections, tried on one of its own: it takes
    CAP_NET_ADMIN, iproute2's `ss`, and a kernel with INET_DIAG_DESTROY."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as own:
        try:
            cut([(own.getsockname(), own.getpeername())])
            own.sendall(b".")
        except OSError as error:
            if isinstance(error, ConnectionError):
                return ""
    return "closing connections takes root, iproute2's ss and Linux"


def own_connections() -> list[tuple[Address, Address]]:
    """This process's, but for Ray's, which are IPv6 sockets: Ray ends a process that it cannot reach."""
    connections = psutil.Process().net_connections("tcp4")
    return [(each.laddr, each.raddr) for each in connections if each.status == psutil.CONN_ESTABLISHED]


def cut(connections: Sequence[tuple[Address, Address]]) -> None:
    """Both ends hear of it, and messages under way are lost."""
    for (host, port), (peer, peer_port) in connections:
        ends = ["src", f"{host}:{port}", "dst", f"{peer}:{peer_port}"]
        subprocess.run(["ss", "--kill", "--tcp", "--numeric", *ends], capture_output=True, check=False)


def cut_own(folder: Path) -> AbstractContextManager[None]:
    cut(own_connections())
    return nullcontext()
