"""The links of a cluster."""

import math
from collections.abc import Sequence
from typing import final

from paceline.cluster.description import Cluster, Hosts
from paceline.cluster.worker_costs import WorkerCosts
from paceline.engines.virtual.computing.cores import Thread
from paceline.engines.virtual.network.links import Handling, Link, Path

BYTES_PER_GBIT = 1e9 / 8
MEMORY_LATENCY_S = 1e-6


@final
class Wiring:
    """Says which links a message takes: network cards, racks' cables, the core between racks, and sites' lines.

    A host's core that packs what servers and workers exchange is a link, too. Cores that hosts share handle messages,
    in `handlers`: a thread for each host.
    """

    def __init__(self, cluster: Cluster, handlers: Sequence[Thread] = ()) -> None:
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

        costs = cluster.communication
        self._packers: list[Link] = []
        if costs.packing_gbyte_per_s is not None or handlers:
            self._packers = [Link(f"{name} core", costs.packing_bytes_per_s) for name in names]
        self._packing = [Handling(thread, costs.shared_core_bytes_per_s) for thread in handlers]
        # The sender's part of the work is among what its worker does.
        taken_core_s = WorkerCosts.of(cluster).taken_core_s
        self._messages = [Handling(thread, math.inf, taken_core_s) for thread in handlers]
        self._hops = [Handling(thread, math.inf, costs.hop_core_us * 1e-6) for thread in handlers if costs.hop_core_us]

    def between_workers_and_servers(self, source: int, destination: int) -> Path:
        """The way between a worker's host and a server's, through cores that pack and unpack."""
        path = self(source, destination)
        if source == destination or not self._packers:
            return path
        if self._packing:
            path = (self._packing[source], *path, self._packing[destination])
        return (self._packers[source], *path, self._packers[destination])

    def between_workers(self, source: int, destination: int) -> Path:
        """The way of a message of one worker to another."""
        path = self(source, destination)
        if source == destination or not self._messages:
            return path
        return (*path, self._messages[destination])

    def between_ranks(self, source: int, destination: int) -> Path:
        """The way of a message of a collective operation."""
        path = self(source, destination)
        if source == destination or not self._hops:
            return path
        return (*path, self._hops[destination])

    def __call__(self, source: int, destination: int) -> Path:
        """The links from one host to another, the sender's own first."""
        if source == destination:
            return (self._memories[source],)
        up, down = self._ups[source], self._downs[destination]
        here, there = self._rack_of[source], self._rack_of[destination]
        if here == there and not self._site_links:
            return (up, down)
        path: list[Link | Handling] = [up]
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
