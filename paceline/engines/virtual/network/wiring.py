"""The links of a cluster."""

import math
from collections.abc import Sequence
from typing import final

from paceline.cluster.description import Cluster, Hosts
from paceline.engines.virtual.network.links import Link, SameLink

BYTES_PER_GBIT = 1e9 / 8
MEMORY_LATENCY_S = 1e-6


@final
class Wiring:
    """Says which links a message takes: network cards, racks' cables, the core between racks, and sites' lines.

    Work of cores is a link, too: a host's core that packs what servers and workers exchange, and the cores of a machine
    that hosts share, which messages keep busy.
    """

    def __init__(self, cluster: Cluster) -> None:
        hosts, names = cluster.each_host(), cluster.names()
        self._ups = [_card(host, name, "up") for host, name in zip(hosts, names, strict=True)]
        self._downs = [_card(host, name, "down") for host, name in zip(hosts, names, strict=True)]
        self._memories = [
            Link(f"{name} memory", host.memory_gbyte_per_s * 1e9, MEMORY_LATENCY_S)
            for host, name in zip(hosts, names, strict=True)
        ]
        racks = cluster.racks
        self._rack_of = [number // racks.hosts if racks is not None else 0 for number in range(len(hosts))]
        self._rack_links: list[tuple[Link, Link]] = []
        self._core: tuple[Link, ...] = ()
        if racks is not None:
            half_s = racks.latency_us * 1e-6 / 2
            self._rack_links = [
                _both_ways(f"rack {rack}", racks.bandwidth_gbit_per_s, half_s) for rack in range(self._rack_of[-1] + 1)
            ]
            if racks.core_gbit_per_s is not None:
                self._core = (Link("core", racks.core_gbit_per_s * BYTES_PER_GBIT),)
        self._site_of = [host.site for host in hosts]
        self._site_links = {
            site.name: _both_ways(f"site {site.name}", site.bandwidth_gbit_per_s, site.latency_ms * 1e-3)
            for site in cluster.sites
        }

        costs, cores = cluster.communication, cluster.shared_cores
        self._packers: list[Link] = []
        self._machine: tuple[Link, ...] = ()
        self._at_home: tuple[Link, ...] = ()
        self._messaging: tuple[Link, ...] = ()
        if costs.packing_gbyte_per_s is not None or cores is not None:
            self._packers = [Link(f"{name} core", costs.packing_bytes_per_s) for name in names]
        if cores is not None:
            # A request and its answer pass twice each. The burst is what senders are charged for, and cores have done.
            passing_s, message_s = costs.request_core_us * 1e-6 / 4 / cores, costs.message_core_us * 1e-6 / cores
            bytes_per_s = costs.shared_core_bytes_per_s * cores
            self._machine = (Link("shared cores", bytes_per_s, message_s=passing_s, burst_s=costs.request_us * 1e-6),)
            # On one host nothing is packed, and a request and its answer pass once each.
            if passing_s:
                self._at_home = (SameLink(self._machine[0], bytes_per_s=math.inf, message_s=2 * passing_s),)
            self._messaging = (
                Link("shared cores of messages", math.inf, message_s=message_s, burst_s=costs.message_us * 1e-6),
            )

    def between_workers_and_servers(self, source: int, destination: int) -> Sequence[Link]:
        """The links between a worker's host and a server's, cores that pack and unpack among them."""
        path = self(source, destination)
        if source == destination:
            return (*path, *self._at_home)
        if not self._packers:
            return path
        return (
            self._packers[source], *self._machine, *path, *self._machine, self._packers[destination]
        )  # fmt: skip

    def between_workers(self, source: int, destination: int) -> Sequence[Link]:
        """The links for a message of one worker to another."""
        path = self(source, destination)
        return path if source == destination else (*path, *self._messaging)

    def __call__(self, source: int, destination: int) -> Sequence[Link]:
        """The links from one host to another, the sender's own first."""
        if source == destination:
            return (self._memories[source],)
        up, down = self._ups[source], self._downs[destination]
        here, there = self._rack_of[source], self._rack_of[destination]
        if here == there and not self._site_links:
            return (up, down)
        path = [up]
        if here != there:
            path += (self._rack_links[here][0], *self._core)
        if self._site_of[source] != self._site_of[destination]:
            path += (self._site_links[self._site_of[source]][0], self._site_links[self._site_of[destination]][1])
        if here != there:
            path.append(self._rack_links[there][1])
        return (*path, down)


def _card(host: Hosts, name: str, direction: str) -> Link:
    gbit_per_s = host.bandwidth_gbit_per_s
    if direction == "up" and host.up_gbit_per_s is not None:
        gbit_per_s = host.up_gbit_per_s
    bytes_per_s = gbit_per_s * BYTES_PER_GBIT
    burst_s = host.burst_kbyte * 1e3 / bytes_per_s
    return Link(f"{name} {direction}", bytes_per_s, host.latency_us * 1e-6 / 2, burst_s=burst_s)


def _both_ways(name: str, gbit_per_s: float, latency_s: float) -> tuple[Link, Link]:
    bytes_per_s = gbit_per_s * BYTES_PER_GBIT
    return Link(f"{name} up", bytes_per_s, latency_s), Link(f"{name} down", bytes_per_s, latency_s)
