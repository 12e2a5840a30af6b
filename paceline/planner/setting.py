"""Who is where, on which links, and how long each computes: what every prediction for some workers starts from."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np

from paceline.cluster.description import Cluster
from paceline.cluster.placement import Places, place
from paceline.cluster.worker_costs import WorkerCosts
from paceline.engines.virtual.computing.durations import StepCost
from paceline.engines.virtual.network.wiring import MEMORY_LATENCY_S
from paceline.errors import UsageError
from paceline.planner import core_turns, costs, stragglers
from paceline.planner.demand import StepWork
from paceline.planner.fabric import Busiest, Fabric, Floats, Loads, Numbers, fabric_of
from paceline.planner.stragglers import Group, StepTimes
from paceline.planner.trees import Trees

_MOST_TURNS = 64  # steps that are drawn where workers take turns at cores; further ones count in proportion
_NUM_DRAWS, _LEAST_DRAWS = 16384, 64  # of computing times then, of all workers and steps together; and tries


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
    least_s: float = 0.0
    """That a round takes, however small the tensor."""

    @cached_property
    def hop_bytes_per_s(self) -> float:
        """The slowest hop's rate while all hops are busy."""
        if len(self.leaders) == 1:
            return float("inf")
        return float(self.fabric.shares_per_s(self.leaders, np.roll(self.leaders, -1)).min())

    def hop_latencies_s(self, num_bytes: float) -> Floats:
        """What each hop takes besides passing its part of the tensor. A card makes up for being idle meanwhile by what
        it lets pass at once after a silence."""
        idle_s = self.fabric.latency_s(self.leaders, np.roll(self.leaders, -1)) + self.message_s
        at_once_bytes = np.minimum(self.fabric.burst_bytes[self.leaders], num_bytes / len(self.leaders))
        found: Floats = np.maximum(0.0, idle_s - at_once_bytes / self.hop_bytes_per_s)
        return found

    def parts_s(self, num_bytes: float) -> tuple[float, float]:
        """How long it keeps its busiest link or memory busy, and how much longer it takes."""
        ring_s = costs.ring_s(len(self.leaders), num_bytes, bytes_per_s=self.hop_bytes_per_s)
        hop_s = float(self.hop_latencies_s(num_bytes).mean())
        latency_s = costs.ring_s(len(self.leaders), 0.0, bytes_per_s=1.0, latency_s=hop_s)
        memory_s = float((self.num_inner * num_bytes / self.fabric.rates.memory[self.leaders]).max())
        hand_over_s = 2 * MEMORY_LATENCY_S * bool(self.num_inner.any())
        busy_s = max(ring_s, 2 * memory_s)
        latency_s = max(latency_s, 2 * (len(self.leaders) - 1) * self.least_s - ring_s)
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
        takes_turns = cluster.shared_cores is not None
        groups = [
            Group(
                StepTimes(compute, mean_s(*kind)),
                count,
                kind[1] if takes_turns and not hosts[kind[0]].devices else 1,
            )
            for kind, count in counts.items()
        ]
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

    @cached_property
    def cores(self) -> Numbers:
        """Each worker's; of those on devices, one each."""
        groups, places = [self.groups[number] for number in self.group_of], self.places.workers
        return np.array(
            [
                self.cluster.core_of(host) if group.num_sharing > 1 else self.cluster.num_hosts + rank
                for rank, (host, group) in enumerate(zip(places, groups, strict=True))
            ]
        )

    @cached_property
    def core_shares(self) -> Floats:
        """How long each worker takes for a second's work of a core of speed 1, which other workers may share."""
        hosts, sharing = self.cluster.each_host(), [self.groups[number].num_sharing for number in self.group_of]
        speeds = np.array([hosts[host].speed for host in self.places.workers])
        shares: Floats = np.array(sharing) / speeds
        return shares

    @cached_property
    def takes_turns(self) -> bool:
        """Whether workers wait for others to compute on their core."""
        return any(group.num_sharing > 1 for group in self.groups)

    def drawn_s(self, num_steps: int, num_draws: int) -> Floats:
        """Typical draws of how long each worker computes so many steps, shape (draws, workers). Where they take turns
        at cores they begin together, and it is the time until they are done, but for what a step takes besides."""
        chances = np.random.default_rng(0).random((num_steps, num_draws, self.num_workers))  # the same for all compared
        needed_s = np.empty_like(chances)
        for number, group in enumerate(self.groups):
            ranks = self.ranks_of(number)
            needed_s[..., ranks] = group.times.at(chances[..., ranks]) / group.num_sharing
        if not self.takes_turns:
            computed_s: Floats = needed_s.sum(axis=0)
            return computed_s
        rest_s = self.work.overhead_s
        return core_turns.ends_s(needed_s, self.cores, rest_s=rest_s) - (num_steps - 1) * rest_s

    def slowest_s(self, num_steps: float = 1, *, left_out: int = 0, among: Sequence[Group] = ()) -> float:
        """The mean time of a step of the slowest worker but `left_out`, which all take so many before any waits.

        Args:
            among: whom; none: all.
        """
        if not self.takes_turns:
            return stragglers.expected_s(among or self.groups, left_out=left_out, num_steps=num_steps)
        always_s = float(np.sort(self.turn_s)[-1 - left_out])  # whom all come to wait for, also of few neighbours
        drawn = min(math.ceil(num_steps), _MOST_TURNS) if math.isfinite(num_steps) else _MOST_TURNS
        size = sum(group.count for group in among) or self.num_workers
        slowest_s = core_turns.last_of_some_s(self._turns_s(drawn), size, left_out=left_out) / drawn
        return always_s + max(0.0, slowest_s - always_s) * math.sqrt(min(1.0, drawn / num_steps))

    @cached_property
    def turn_s(self) -> Floats:
        """Of each worker, the mean time from one step's computing to the next one's where nobody waits for another but
        at a core, but for what a step takes besides: while a worker does that, others have the core."""
        needed_s = np.empty(self.num_workers)
        for number, group in enumerate(self.groups):
            needed_s[self.ranks_of(number)] = group.times.expected_s / group.num_sharing
        of_core_s = np.bincount(self.cores, weights=needed_s)[self.cores]
        found: Floats = np.maximum(of_core_s - self.work.overhead_s, needed_s)
        return found

    def queued_s(self, each_s: float) -> float:
        """How much longer a step is by what follows an exchange and needs each worker's core so long. Workers of one
        core do it one after another, and so begin the next step one after another, which makes their wait for the core
        shorter."""
        most = max(group.num_sharing for group in self.groups)
        mean_s = max(group.times.expected_s / group.num_sharing for group in self.groups)
        return each_s + (most - 1) * max(0.0, each_s - mean_s)

    @cached_property
    def steady_s(self) -> float:
        """The mean time of a step of workers that never wait, where all are as slow as the slowest one."""
        return float(self.turn_s.max()) if self.takes_turns else max(group.times.expected_s for group in self.groups)

    def _turns_s(self, num_steps: int) -> Floats:
        """As `drawn_s`, with as many draws as a mean needs."""
        num_draws = 1 if self.is_constant else max(_LEAST_DRAWS, _NUM_DRAWS // (num_steps * self.num_workers))
        return self.drawn_s(num_steps, num_draws)

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
        return self.ring_among(leaders, np.array([len(host) - 1 for host in ranks]))

    def ring_among(self, leaders: Numbers, num_inner: Numbers) -> RingReduction:
        return RingReduction(self.fabric, leaders, num_inner, least_s=self.hop_s(leaders))

    @cached_property
    def ring_of_ranks(self) -> RingReduction:
        """Through every rank, as the algorithm over send and receive goes."""
        ranks = np.array(self.places.workers)
        round_s = self.message_s + self.message_wait_s(ranks, np.roll(ranks, -1), self.message_s)
        return RingReduction(self.fabric, ranks, np.zeros_like(ranks), self.message_s, round_s)

    @cached_property
    def trees(self) -> Trees:
        return Trees.of(np.array(self.places.workers), self.fabric)

    @cached_property
    def costs(self) -> WorkerCosts:
        return WorkerCosts.of(self.cluster)

    @property
    def posting(self) -> dict[str, float]:
        """What a message takes both ends besides passing links, and how long one right after it holds its sender up."""
        return {"message_s": self.message_s, "further_s": self.costs.further_message.time_s}

    @property
    def message_s(self) -> float:
        """What a lone message takes both ends besides passing links."""
        return self.costs.message.time_s + self.costs.taken_core_s

    @cached_property
    def operation_s(self) -> float:
        """Starting a collective operation holds workers up for so long, until the last of a core that they share has
        done it."""
        own_s, core_s = self.costs.operation
        return own_s + max(0, self._most_on_a_core(np.array(self.places.workers)) - 1) * core_s

    def hop_s(self, hosts: Numbers) -> float:
        """The least that a collective operation takes to pass something on from each of these hosts to another."""
        costs, most = self.cluster.communication, self._most_on_a_core(hosts)
        return (most * costs.hop_core_us if most else costs.hop_us) * 1e-6

    def burst_turn_s(self, hosts: Numbers, num_messages: int) -> float:
        """The least that it takes a worker of each of these hosts to send other ones so many messages: cores that hosts
        share handle both ends of all of them, one after the other."""
        ends_s = self.costs.burst(num_messages).core_s + num_messages * self.costs.taken_core_s
        return self._most_on_a_core(hosts) * ends_s

    def message_wait_s(self, senders: Numbers, receivers: Numbers, alone_s: float) -> float:
        """How much longer than `alone_s` it takes until a message from each of these hosts to the one in the same place
        has come. Cores that hosts share handle all ends one after the other, and the last message that leaves one
        leaves behind the others."""
        if self.cluster.shared_cores is None:
            return 0.0
        sending_s = np.full(len(senders), self.costs.message.core_s)
        receiving_s = np.where(senders != receivers, self.costs.taken_core_s, 0.0)
        leaving_s = np.bincount(senders % self.cluster.shared_cores, sending_s, minlength=self.cluster.shared_cores)
        coming_s = np.bincount(receivers % self.cluster.shared_cores, receiving_s, minlength=self.cluster.shared_cores)
        turn_s, behind_s = float((leaving_s + coming_s).max()), float(leaving_s.max() - sending_s.max())
        return max(turn_s - alone_s, behind_s, 0.0)

    def _most_on_a_core(self, hosts: Numbers) -> int:
        """How many of these hosts share the core that most are on; 0 where hosts share none."""
        if self.cluster.shared_cores is None:
            return 0
        return max(Counter(map(self.cluster.core_of, hosts.tolist())).values())

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
