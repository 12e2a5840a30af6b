"""Virtual ranks with a collective each, for tests: what `collective_harness.World` is for processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.cluster.placement import place
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network.collective import VirtualCollective
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.meeting import Meeting
from paceline.engines.virtual.network.wiring import Wiring
from paceline.engines.virtual.process import Process, Scheduler
from paceline.errors import Aborted
from tests.ranks import RankFailed

GIGABIT = 125e6
"""Bytes per second of the links."""


class VirtualWorld:
    """`size` ranks on alike hosts with 1 Gb/s; every call of `run` is a world of its own."""

    backend = "virtual"

    def __init__(self, size: int, *, latency_us: float = 10.0, workers_per_host: int = 1) -> None:
        self.size = size
        hosts = Hosts(count=size, workers=workers_per_host, bandwidth_gbit_per_s=1.0, latency_us=latency_us)
        self._cluster = Cluster(hosts=(hosts,), compute=Compute(step_s=1.0))
        self.took_s = 0.0
        """Virtual time of the last call."""
        self.collectives: list[VirtualCollective] = []
        """Of the last call."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(collective, *arguments)` on every rank; the results in rank order.

        Raises:
            RankFailed: a rank raised, or can never go on.
        """
        return self.run_each([lambda c: function(c, *arguments)] * self.size)

    def run_each(self, functions: list[Callable[[VirtualCollective], Any]]) -> list[Any]:
        """A function for each rank."""
        timeline, topology = EventQueue(), Wiring(self._cluster)
        places = place(self._cluster, num_workers=self.size, num_servers=0)
        meeting = Meeting(
            timeline,
            Network(timeline, topology),
            host_of=places.workers,
            ranks_by_host=places.ranks_by_host,
        )
        scheduler = Scheduler(timeline, require_waitable=lambda: None)
        results: dict[int, Any] = {}
        failures: list[str] = []
        self.collectives = []

        def work(rank: int) -> None:
            try:
                results[rank] = functions[rank](self.collectives[rank])
            except Exception:
                failures.append(f"rank {rank}: {traceback.format_exc()}")

        for rank in range(self.size):
            process: Process = scheduler.spawn(f"rank-{rank}", lambda rank=rank: work(rank))  # type: ignore[misc]
            self.collectives.append(VirtualCollective(meeting, process, rank=rank))
        scheduler.run()
        stuck = [p for p in scheduler.processes if not p.is_over]
        waiting = [f"{p.name} waits for {p.waits_for()}" for p in stuck if p.waits_for is not None]
        if failures or stuck:
            scheduler.abort(Aborted("the test is over"))
            raise RankFailed("\n".join([*failures, *waiting]))
        self.took_s = timeline.now_s
        return [results[rank] for rank in range(self.size)]
