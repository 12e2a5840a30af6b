"""What a link carries: a plain TCP stream in each direction's turn, without the headers.

`python -m peers.tcp_goodput --listen ADDRESS` prints the bytes per second that it received; `--send ADDRESS` sends.
With both, one process does both at the same time, as a rank of a ring.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from contextlib import suppress

PORT = 29400
CHUNK_BYTES = 1 << 20
_WARMUP_S = 0.5  # the token bucket's burst, and TCP's slow start
_CONNECT_S = 30.0


def receive(listener: socket.socket, *, seconds: float) -> float:
    """Bytes per second that one sender got across, over so many seconds after the warm-up."""
    connection, _ = listener.accept()
    buffer = bytearray(CHUNK_BYTES)
    with connection:
        _receive_for(connection, buffer, _WARMUP_S)
        began_s = time.perf_counter()
        num_bytes = _receive_for(connection, buffer, seconds)
        return num_bytes / (time.perf_counter() - began_s)


def _receive_for(connection: socket.socket, buffer: bytearray, seconds: float) -> int:
    until_s = time.perf_counter() + seconds
    num_bytes = 0
    while time.perf_counter() < until_s:
        num_bytes += connection.recv_into(buffer)
    return num_bytes


def send(address: str) -> None:
    """Send until the receiver has had enough."""
    with _connect(address) as connection, suppress(ConnectionError):
        while True:
            connection.sendall(bytes(CHUNK_BYTES))


def _connect(address: str) -> socket.socket:
    until_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=_CONNECT_S)
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", metavar="ADDRESS")
    parser.add_argument("--send", metavar="ADDRESS")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    sender = threading.Thread(target=send, args=(args.send,), daemon=True) if args.send else None
    if sender is not None:
        sender.start()
    if args.listen:
        with socket.create_server((args.listen, PORT)) as listener:
            print(receive(listener, seconds=args.seconds))
    if sender is not None:
        sender.join(_CONNECT_S)


if __name__ == "__main__":
    main()
