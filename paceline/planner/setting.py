"""Who is where, on which links, and how long each computes: what every prediction for some workers starts from."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np

from paceline.cluster.description import Cluster
from paceline.cluster.placement import Places, place
from paceline.engines.virtual.computing.durations import StepCost
from paceline.engines.virtual.network.wiring import MEMORY_LATENCY_S
from paceline.errors import UsageError
from paceline.planner import costs
from paceline.planner.demand import StepWork
from paceline.planner.fabric import Busiest, Fabric, Floats, Loads, Numbers, fabric_of
from paceline.planner.stragglers import Group, StepTimes
from paceline.planner.trees import Trees


@final
@dataclass(frozen=True)
class RingReduction:
    """All-reduce around a ring among hosts, and through memory within each, as the virtual engine does it."""

    fabric: Fabric
    leaders: Numbers
    """The host of each place in the ring."""
    num_inner: Numbers
    """Further workers of each of these hosts."""
    message_s: float = 0.0

    @cached_property
    def hop_bytes_per_s(self) -> float:
        """The slowest hop's rate while all hops are busy."""
        if len(self.leaders) == 1:
            return float("inf")
        return float(self.fabric.shares_per_s(self.leaders, np.roll(self.leaders, -1)).min())

    @cached_property
    def hop_latencies_s(self) -> Floats:
        return self.fabric.latency_s(self.leaders, np.roll(self.leaders, -1)) + self.message_s

    def parts_s(self, num_bytes: float) -> tuple[float, float]:
        """How long it keeps its busiest link or memory busy, and how much longer it takes."""
        ring_s = costs.ring_s(len(self.leaders), num_bytes, bytes_per_s=self.hop_bytes_per_s)
        latency_s = costs.ring_s(len(self.leaders), 0.0, bytes_per_s=1.0, latency_s=float(self.hop_latencies_s.mean()))
        memory_s = float((self.num_inner * num_bytes / self.fabric.rates.memory[self.leaders]).max())
        hand_over_s = 2 * MEMORY_LATENCY_S * bool(self.num_inner.any())
        busy_s = max(ring_s, 2 * memory_s)
        return busy_s, ring_s + 2 * memory_s - busy_s + latency_s + hand_over_s

    def loads(self, num_bytes: float) -> Loads:
        size = len(self.leaders)
        inner_bytes: Floats = 2 * num_bytes * self.num_inner.astype(np.float64)
        inner = self.fabric.messages(self.leaders, self.leaders, inner_bytes)
        if size == 1:
            return inner
        return inner + self.fabric.messages(self.leaders, np.roll(self.leaders, -1), 2 * (size - 1) / size * num_bytes)


@final
@dataclass(frozen=True)
class Setting:
    """Some workers and servers of a cluster, and the work of a step."""

    cluster: Cluster
    work: StepWork
    places: Places
    groups: tuple[Group, ...]
    """Workers by how long they compute."""
    group_of: tuple[int, ...]
    """The index in `groups` of each rank's group."""
    alone_s: float
    """The first worker's computing time on a host of its own."""
    fabric: Fabric

    @classmethod
    def of(cls, cluster: Cluster, work: StepWork, *, num_workers: int, num_servers: int) -> "Setting":
        """Raises UsageError without room, after a probe with another model, or if a step's time is unknown."""
        described = cluster
        if work.step_s is not None:
            cluster = replace(
                cluster, compute=replace(cluster.compute, step_s=work.step_s, sample_s=None, dispatch_us=0.0)
            )
        compute = cluster.compute
        if shares := compute.shares_of(len(work.tensor_bytes)):
            work = replace(work, backward_shares=shares)
        if compute.is_counted and not work.forward_flop:
            raise UsageError(
                "nothing says how long a step computes: give step_s in [compute] of the cluster's file or in the work"
            )
        places = place(described, num_workers=num_workers, num_servers=num_servers)
        hosts = cluster.each_host()
        # Where hosts share cores, all on one are taken to compute at the same time, as they do if they wait for others.
        homes = [("host", host) if hosts[host].devices else ("core", cluster.core_of(host)) for host in places.workers]
        sharing = Counter(homes)

        def mean_s(host: int, num_sharing: int) -> float:
            cost = StepCost(cluster, hosts[host], num_sharing=num_sharing)
            return cost.seconds(
                num_samples=work.samples, forward_flop=work.forward_flop, forward_calls=work.forward_calls
            )

        first_of: dict[int, int] = {}
        kinds = [
            (first_of.setdefault(id(hosts[host]), host), sharing[home])
            for host, home in zip(places.workers, homes, strict=True)
        ]
        counts = Counter(kinds)
        groups = [Group(StepTimes(compute, mean_s(*kind)), count) for kind, count in counts.items()]
        numbers = {kind: number for number, kind in enumerate(counts)}
        alone = StepTimes(compute, mean_s(places.workers[0], 1))
        group_of = tuple(numbers[kind] for kind in kinds)
        return cls(cluster, work, places, tuple(groups), group_of, alone.expected_s, fabric_of(described))

    @property
    def num_workers(self) -> int:
        return len(self.places.workers)

    @cached_property
    def mean_s(self) -> float:
        return sum(group.times.expected_s * group.count for group in self.groups) / self.num_workers

    @cached_property
    def is_constant(self) -> bool:
        return not any(group.times.variance_s2 for group in self.groups)

    def ranks_of(self, group: int) -> Numbers:
        return np.flatnonzero(np.array(self.group_of) == group)

    @property
    def alone_samples_per_s(self) -> float:
        """The rate of one worker that exchanges nothing."""
        return self.work.samples / (self.alone_s + self.work.overhead_s)

    @cached_property
    def ring(self) -> RingReduction:
        ranks = self.places.ranks_by_host
        leaders = np.array([self.places.workers[host[0]] for host in ranks])
        return RingReduction(self.fabric, leaders, np.array([len(host) - 1 for host in ranks]))

    @cached_property
    def ring_of_ranks(self) -> RingReduction:
        """Through every rank, as the algorithm over send and receive goes."""
        ranks = np.array(self.places.workers)
        return RingReduction(self.fabric, ranks, np.zeros_like(ranks), self.message_s)

    @cached_property
    def trees(self) -> Trees:
        return Trees.of(np.array(self.places.workers), self.fabric)

    @property
    def operation_s(self) -> float:
        """Starting a collective operation holds a worker up for so long."""
        return self.cluster.communication.operation_us * 1e-6

    @property
    def message_s(self) -> float:
        """Posting a message holds a worker up for so long."""
        return self.cluster.communication.message_us * 1e-6

    def halving_stages(self, num_bytes: float) -> list[tuple[Numbers, Numbers, float]]:
        """Sending hosts, receiving hosts and bytes, stage by stage."""
        ranks = np.array(self.places.workers)
        return [(ranks[here], ranks[there], size) for here, there, size in _halving(len(ranks), num_bytes)]

    def timed_halving(self, num_bytes: float) -> list[tuple[Numbers, Numbers, Floats]]:
        """Sending ranks, receiving ranks and each message's time, stage by stage."""
        fabric, ranks = self.fabric, np.array(self.places.workers)
        found = []
        for here, there, size in _halving(len(ranks), num_bytes):
            sent_s = size / fabric.shares_per_s(ranks[here], ranks[there]) + fabric.latency_s(ranks[here], ranks[there])
            found.append((here, there, sent_s + self.message_s))
        return found

    def kind_of(self, busiest: Busiest) -> str:
        if busiest.kind in ("up", "down"):
            if busiest.number not in self.places.servers:
                return "a worker's card"
            return "the card of a host with both" if busiest.number in self.places.workers else "a server's card"
        words = {"memory": "a host's memory", "core": "the core", "": "nothing"}
        words |= {"packing": "a host's packing", "machine": "the shared cores"}
        return words.get(busiest.kind, "a rack's cable" if busiest.kind.startswith("rack") else "a site's line")

    def link_bytes(self, loads: Loads) -> dict[str, float]:
        """The most bytes on one link of each kind that carries some, in the fuller direction."""
        workers, servers = np.array(self.places.workers), np.array(self.places.servers, dtype=np.int64)
        card = np.maximum(loads.up, loads.down)
        racks, sites = np.maximum(loads.rack_up, loads.rack_down), np.maximum(loads.site_up, loads.site_down)
        found = {
            "worker's card": float(card[workers].max()),
            "server's card": float(card[servers].max()) if len(servers) else 0.0,
            "host's memory": float(loads.memory.max()),
            "rack's cable": float(racks.max()) if self.cluster.racks is not None else 0.0,
            "core": float(loads.core[0]) if self.cluster.racks is not None else 0.0,
            "site's line": float(sites.max()),
        }
        if self.cluster.communication.packing_gbyte_per_s is not None:
            found["host's packing"] = float(loads.packing.max())
            found["shared cores"] = float(loads.machine[0]) if self.cluster.shared_cores is not None else 0.0
        return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes > 0}


def _halving(size: int, num_bytes: float) -> list[tuple[Numbers, Numbers, float]]:
    """Senders, receivers and bytes of each stage of recursive halving and doubling among so many ranks."""
    paired = 1 << (size.bit_length() - 1)
    everyone, guests, partners = np.arange(paired), np.arange(paired, size), np.arange(size - paired)
    stages = []
    distance, part = 1, num_bytes / 2
    while distance < paired:
        stages.append((everyone, everyone ^ distance, part))
        distance, part = 2 * distance, part / 2
    stages += reversed(stages)
    if len(guests):
        stages.insert(0, (guests, partners, num_bytes))
        stages.append((partners, guests, num_bytes))
    return stages
