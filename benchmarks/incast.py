"""How unevenly connections from several hosts to one share its link: plain TCP, nothing of Paceline.

Hosts are network namespaces of this machine with links of limited rate, as in network.py (Linux and root needed). All
hosts but one push to that one as fast as they can, a connection each. A row gives the standard deviation of the
logarithm of what each got in the first second beside an even share, over several tries: what a probe calls
`unevenness`.

    sudo python benchmarks/incast.py --hosts 3 4 5 8 --rates 100 300 1000
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time

from namespaces import Network, network

from paceline.probing.sharing import logarithms_of_shares

PORT = 5001
PUSH_S = 1.0
READ_BYTES = 1 << 18
PATIENCE_S = 10.0
TIMEOUT_S = 60.0


def take(num_hosts: int) -> None:
    """On the host that all push to: print what each connection got."""
    server = socket.create_server(("0.0.0.0", PORT))
    connections = [server.accept()[0] for _ in range(num_hosts)]
    for connection in connections:  # all are there before the first byte leaves
        connection.sendall(b"g")
        connection.setblocking(False)
    counts, buffer = [0] * num_hosts, bytearray(READ_BYTES)
    until_s = time.perf_counter() + PUSH_S
    while time.perf_counter() < until_s:
        for number, connection in enumerate(connections):
            try:
                counts[number] += connection.recv_into(buffer)
            except BlockingIOError:
                time.sleep(1e-5)
    print(json.dumps(counts))


def push(address: str) -> None:
    """On every other host, until nobody takes any more."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = socket.create_connection((address, PORT))
            break
        except OSError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.05)
    connection.recv(1)
    try:
        while True:
            connection.sendall(bytes(READ_BYTES))
    except OSError:
        pass


def tried(net: Network, num_hosts: int) -> list[int]:
    """What each connection got, once."""
    here = [sys.executable, __file__]
    commands = {net.hosts[0]: [*here, "--take", str(num_hosts - 1)]}
    commands |= {host: [*here, "--push", net.hosts[0].address] for host in net.hosts[1:]}
    counts: list[int] = json.loads(net.run_all(commands, timeout_s=TIMEOUT_S)[0])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[3, 4, 5, 8], metavar="N")
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 300, 1000], metavar="MBIT")
    parser.add_argument("--tries", type=int, default=6)
    parser.add_argument("--take", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--push", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.take is not None:
        take(given.take)
        return
    if given.push is not None:
        push(given.push)
        return
    print("hosts  " + "  ".join(f"{rate:g} Mbit/s" for rate in given.rates))
    for num_hosts in given.hosts:
        with network(num_hosts) as net:
            found = []
            for rate in given.rates:
                net.limit(rate)
                tries = [logarithms_of_shares(tried(net, num_hosts)) for _ in range(given.tries)]
                found.append(statistics.pstdev(share for shares in tries for share in shares))
        print(f"{num_hosts:>5}  " + "  ".join(f"{spread:.2f}" for spread in found), flush=True)


if __name__ == "__main__":
    main()
