"""The TCP connections of a gloo group, and how to end them: gloo's own `abort` does nothing, and a group that has an
operation under way cannot be destroyed before its peers answer or it times out."""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from typing import final

_DESCRIPTORS = "/dev/fd"  # of this process, on Linux and macOS
Endpoint = tuple[str, int]
"""An IP address and a port."""
LISTENER_BYTES = 64


def listeners() -> set[Endpoint]:
    """Where this process awaits TCP connections."""
    return {own.getsockname()[:2] for own in _tcp_sockets() if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def pack_listener(listener: Endpoint | None) -> bytes:
    """Make LISTENER_BYTES bytes of it, which other ranks are told."""
    text = "" if listener is None else f"{listener[0]} {listener[1]}"
    return text.encode().ljust(LISTENER_BYTES)


@final
class Connections:
    """
    Args:
        listeners: what each rank has said of its group's own with `pack_listener`.
    """

    def __init__(self, listeners: Collection[bytes]) -> None:
        told = [text.decode().split() for text in listeners]
        self._listeners = {(address, int(port)) for address, port in filter(None, told)}

    def end(self) -> None:
        """Break them all, so that whatever any rank has under way on them fails at once."""
        for own in _tcp_sockets():
            with contextlib.suppress(OSError):  # it is connected to nobody, or no longer
                ends = {own.getsockname()[:2], own.getpeername()[:2]}
                if ends & self._listeners:
                    own.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[socket.socket]:
    """This process's, each as a descriptor of its own for as long as it is looked at."""
    for name in os.listdir(_DESCRIPTORS):
        own = _socket_at(int(name))
        if own is not None:
            with own:
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                    yield own


def _socket_at(number: int) -> socket.socket | None:
    """None: another thread has just closed it, it is no socket, or one that cannot be asked what it is."""
    try:
        descriptor = os.dup(number)
    except OSError:
        return None
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
