"""A simulated cluster's hosts, links and servers, and the world that each worker's script finds there."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from typing import final

from paceline.checkpoint import Checkpoint
from paceline.cluster.description import Cluster
from paceline.cluster.placement import place
from paceline.cluster.worker_costs import WorkerCosts
from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective, Store, Timing
from paceline.comm.mailbox import Mailbox
from paceline.comm.servers.group import Joins, ServerGroup
from paceline.engines.virtual.carrier import VirtualCarrier
from paceline.engines.virtual.computing import requests
from paceline.engines.virtual.computing.cores import Core, Thread
from paceline.engines.virtual.computing.durations import ComputeTimes, StepCost
from paceline.engines.virtual.computing.pace import Pace
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.lead import Lead
from paceline.engines.virtual.network.collective import VirtualCollective
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.mailbox import PostOffice, VirtualMailbox
from paceline.engines.virtual.network.meeting import Meeting
from paceline.engines.virtual.network.wiring import Wiring
from paceline.engines.virtual.process import Process
from paceline.engines.virtual.server import EPOCH, VirtualServer
from paceline.engines.virtual.survival.reforming import VirtualReforming
from paceline.engines.virtual.survival.roll import Roll
from paceline.engines.world import World, device_of
from paceline.errors import UsageError
from paceline.layout import Layout
from paceline.membership import Membership
from paceline.records import Reporter
from paceline.seeding import derive
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec
from paceline.strategies.base import Context
from paceline.strategies.traits import Traits

_US = 1e-6


@final
class Worlds:
    """Makes each worker's world. Raises UsageError if the cluster has no room, or this machine lacks the device."""

    def __init__(self, job: VirtualJob, timeline: EventQueue, reporter: Reporter) -> None:
        cluster = job.cluster
        self.places = place(cluster, num_workers=job.num_workers, num_servers=job.strategy.traits.num_servers)
        require_arrivals(job.strategy.traits, cluster)
        require_no_copies(job.strategy.traits)
        self._job, self._reporter = job, reporter
        self._device = device_of(job.config)
        self._hosts = cluster.each_host()
        self._worker_costs = WorkerCosts.of(cluster)
        self._cores: list[Core] = [Core(timeline) for _ in range(cluster.shared_cores or 0)]
        """The cores that hosts share."""
        links = Wiring(cluster, [self._thread(host) for host in range(len(self._hosts))] if self._cores else ())
        network = partial(Network, timeline, unevenness=cluster.communication.unevenness, seed=job.config.seed)
        self._messages = network(links.between_workers)
        # Cores that hosts share are awake, so that a hop takes no least time: what it takes is its turn at them.
        least_s = 0.0 if self._cores else cluster.communication.hop_us * _US
        operations = partial(network, links.between_ranks, least_s=least_s)
        self._timeline, self._operations = timeline, operations()
        self.host_of = dict(enumerate(self.places.workers))
        """Each rank's host; those who join are added."""
        self._costs: dict[int, StepCost] = {}
        self._meeting = self.meet(tuple(self.host_of))
        self._offices: dict[tuple[int, int], PostOffice] = {}
        """By epoch of membership, and number."""
        hosts, leaders = self.places.ranks_by_host, [ranks[0] for ranks in self.places.ranks_by_host]
        self._groups: list[tuple[Sequence[int], Meeting]] = []
        """Where ranks meet for what those of a host do before hosts meet: those of each host, and last the first ones
        of all."""
        if 1 < len(hosts) < job.num_workers:
            for ranks in (*hosts, leaders):
                host_of = [self.places.workers[rank] for rank in ranks]
                by_host = [[place] for place in range(len(ranks))] if ranks is leaders else [list(range(len(ranks)))]
                meeting = Meeting(timeline, operations(), host_of=host_of, ranks_by_host=by_host)
                self._groups.append((ranks, meeting))
        self._server_network = network(links.between_workers_and_servers)
        self.servers = [
            VirtualServer(
                timeline,
                self._server_network,
                index=index,
                host=host,
                memory_bytes_per_s=self._hosts[host].memory_gbyte_per_s * 1e9,
                row_bytes_per_s=self._hosts[host].row_bytes_per_s,
                costs=requests.of_servers(cluster, self._draws("server", index)),
                reporter=reporter,
                speed=self._hosts[host].speed,
                operation_s=cluster.communication.coding_s,
                thread=self._thread(host) if self._cores else None,
            )
            for index, host in enumerate(self.places.servers)
        ]

    def meet(self, ranks: Sequence[int]) -> Meeting:
        """A new place for operations of these ranks, who are known there by their places among them."""
        hosts = [self.host_of[rank] for rank in ranks]
        by_host: dict[int, list[int]] = {}
        for number, host in enumerate(hosts):
            by_host.setdefault(host, []).append(number)
        return Meeting(
            self._timeline,
            self._operations,
            host_of=hosts,
            ranks_by_host=list(by_host.values()),
            messages=self._messages,
        )

    def of(self, rank: int, process: Process, *, before_step: Callable[[], None], roll: Roll | None = None) -> World:
        """The world of a rank.

        Args:
            before_step: is called when a step's computing begins, and may raise to end the worker.
            roll: of a run whose workers come and go.
        """
        if roll is not None:
            return self._changing(rank, process, before_step=before_step, roll=roll)
        job = self._job
        local_ranks = next(ranks for ranks in self.places.ranks_by_host if rank in ranks)
        collective = self._collective(rank, process)
        store_of = partial(self._store, rank, process, collective)
        context = Context(
            rank=rank,
            membership=Membership.first(job.num_workers),
            local_rank=local_ranks.index(rank),
            local_size=len(local_ranks),
            device=self._device,
            collective=collective,
            store=store_of() if self.servers else None,
            store_beside=store_of if self.servers else None,
            connect_mailbox=partial(self._mailbox, rank, process, lambda: self._meeting, count()),
            pacing=self._pace(rank, process, num_sharing=len(local_ranks), before_step=before_step),
        )
        return self._world(context)

    def _changing(self, rank: int, process: Process, *, before_step: Callable[[], None], roll: Roll) -> World:
        """The world of a worker that the others may lose, and that others may join."""
        joins = rank >= self._job.num_workers
        ranks = (rank,) if joins else tuple(range(self._job.num_workers))
        beside = [other for other in ranks if self.host_of[other] == self.host_of[rank]]
        connect = partial(self._connect, process)
        collective = AloneCollective() if joins else connect(roll.meeting, place=rank, timing=Timing())
        reform = VirtualReforming(
            roll,
            process,
            collective,
            rank=rank,
            host_of=self.host_of.__getitem__,
            connect=connect,
            send=self._messages.send,
            joins=joins,
        )
        context = Context(
            rank=rank,
            membership=Membership(EPOCH, ranks),
            local_rank=beside.index(rank),
            local_size=len(beside),
            device=self._device,
            collective=collective,
            store=self._store(rank, process, collective, joins=joins) if self.servers else None,
            connect_mailbox=partial(self._mailbox, rank, process, lambda: roll.meeting, repeat(0)),
            reform=reform,
            lane_keeper=reform,
            num_first=self._job.num_workers,
            num_at_start=self._job.num_at_start or self._job.num_workers,
            pacing=self._pace(
                rank,
                process,
                num_sharing=len(beside),
                before_step=before_step,
                first_host=lambda: self.host_of[roll.living[0] if roll.living else rank],
            ),
        )
        return self._world(context, joins=joins)

    def _world(self, context: Context, *, joins: bool = False) -> World:
        job, checkpoint = self._job, None
        if job.checkpoint is not None and not joins:
            checkpoint = Checkpoint.decode(job.checkpoint, where="the checkpoint")
        return World(context, job.strategy, job.config, self._reporter, checkpoint)

    def _connect(self, process: Process, meeting: Meeting, *, place: int, timing: Timing) -> Collective:
        return (
            AloneCollective(timing=timing)
            if meeting.size == 1
            else self._end_at(meeting, process, place, timing=timing)
        )

    def _end_at(
        self,
        meeting: Meeting,
        process: Process,
        place: int,
        *,
        timing: Timing | None = None,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> VirtualCollective:
        return VirtualCollective(meeting, process, rank=place, costs=self._worker_costs, timing=timing, is_lost=is_lost)

    def _thread(self, host: int) -> Thread:
        """A new one on the host's core."""
        return Thread(self._cores[self._job.cluster.core_of(host)])

    def _draws(self, who: str, *number: int) -> random.Random:
        """What chance adds to the requests of this server, or of this worker to its servers of a number."""
        return random.Random(derive(self._job.config.seed, f"requests of {who}", *number))

    def _pace(
        self,
        rank: int,
        process: Process,
        *,
        num_sharing: int,
        before_step: Callable[[], None],
        first_host: Callable[[], int] | None = None,
    ) -> Pace:
        """`first_host`: the first worker's, where that may be another one."""
        cluster, number = self._job.cluster, self.host_of[rank]
        host, server = self._hosts[number], first_host or (lambda: self.places.workers[0])
        if self._cores and not host.devices:
            num_sharing = 1  # others keep the core busy
            process.lead = Lead(process.timeline, self._thread(number))
        return Pace(
            process,
            ComputeTimes(cluster.compute, seed=self._job.config.seed, rank=rank),
            self._costs.setdefault(rank, StepCost(cluster, host, num_sharing=num_sharing, beside=self._costs.get(0))),
            compute=cluster.compute,
            before_step=before_step,
            send=lambda num_bytes, arrive: self._messages.send(number, server(), num_bytes, arrive),
            operation_s=cluster.communication.coding_s,
        )

    def _collective(self, rank: int, process: Process) -> Collective:
        if self._job.num_workers == 1:
            return AloneCollective()
        loss, draws = self._job.cluster.communication.loss, random.Random(derive(self._job.config.seed, "loss", rank))
        collective = self._end_at(self._meeting, process, rank, is_lost=lambda: draws.random() < loss)
        own = [self._end_at(meeting, process, ranks.index(rank)) for ranks, meeting in self._groups if rank in ranks]
        if own:
            collective.divide(own[0], own[1] if len(own) > 1 else None)
        return collective

    def _mailbox(
        self,
        rank: int,
        process: Process,
        meeting: Callable[[], Meeting],
        numbers: Iterator[int],
        collective: Collective,
        membership: Membership,
    ) -> Mailbox:
        """The worker's next one, which exchanges messages with the others' of the same number. `meeting`: where those
        of this membership meet."""
        which = membership.epoch, next(numbers)
        if which not in self._offices:
            hosts = [self.host_of[other] for other in membership.ranks]
            self._offices[which] = PostOffice(self._messages, meeting(), hosts, costs=self._worker_costs)
        return VirtualMailbox(self._offices[which], process, rank=membership.ranks.index(rank))

    def _store(
        self, rank: int, process: Process, collective: Collective, number: int = 0, *, joins: bool = False
    ) -> Store:
        host = self.host_of[rank]
        carrier = VirtualCarrier(
            self.servers,
            self._server_network,
            process=process,
            host=host,
            row_bytes_per_s=self._hosts[host].row_bytes_per_s,
            costs=requests.of_workers(self._job.cluster, self._draws("worker", rank, number)),
            number=number,
        )
        in_pieces = len({*self.places.workers, *self.places.servers}) > 1
        return ServerGroup(
            carrier,
            collective=collective,
            configure=partial(self._configure, number),
            epoch=EPOCH,
            joins=Joins(rank, in_pieces) if joins else None,
        )

    def _configure(self, number: int, layout: Layout, optimizer: OptimizerSpec, ranges: Sequence[KeyRange]) -> None:
        """Have every server build its shards for the optimizer of this number."""
        members, max_updates = Membership.first(self._job.num_workers), self._job.config.max_steps
        for server, pieces in zip(self.servers, ranges, strict=True):
            spec = self._job.strategy.server_spec(
                layout, pieces, optimizer, members=members, max_updates=max_updates, number=number
            )
            server.configure(replace(spec, outlives_workers=self._job.config.elastic is not None))


def require_no_copies(traits: Traits) -> None:
    """Raises UsageError where servers hand on what they do: simulated time would leave that out."""
    if traits.num_replicas:
        raise UsageError(
            f"replicas={traits.num_replicas} is for real processes so far, since the virtual engine would call what "
            "replicas take free; use replicas=0, or --engine ray"
        )


def require_arrivals(traits: Traits, cluster: Cluster) -> None:
    """Raises UsageError where the cluster loses messages, and a run would not stay true to its method without them."""
    if cluster.communication.loss and traits.missing_messages:
        raise UsageError(f"the cluster loses messages (loss in [communication]): {traits.missing_messages}")
