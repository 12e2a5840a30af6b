"""One run on a virtual cluster, from start to end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import final

from paceline.cluster.placement import place
from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective, OptimizerSpec, Store
from paceline.comm.servers.group import ServerGroup
from paceline.engines.blame import Statement, judge
from paceline.engines.scripting import Outcome, outcome_of
from paceline.engines.standing import Progress, Watcher
from paceline.engines.virtual.carrier import VirtualCarrier
from paceline.engines.virtual.computing.backward import BackwardEnds
from paceline.engines.virtual.computing.durations import failure_s
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.isolation import interpreter
from paceline.engines.virtual.isolation.surroundings import Surroundings
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.network.collective import VirtualCollective
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.meeting import Meeting
from paceline.engines.virtual.network.wiring import Wiring
from paceline.engines.virtual.process import Process, Scheduler
from paceline.engines.virtual.reporter import DirectoryReporter
from paceline.engines.virtual.server import EPOCH, VirtualServer
from paceline.engines.virtual.spread.crew import Crew, crews_of
from paceline.engines.virtual.spread.deputy import Deputy
from paceline.engines.virtual.spread.order import RecordsInOrder
from paceline.engines.virtual.worlds import Worlds, run_in
from paceline.errors import Aborted, RunFailed, UsageError
from paceline.layout import Layout
from paceline.records import Record
from paceline.server.ranges import KeyRange
from paceline.server.spec import ServerSpec


@final
class VirtualRun:
    """Runs one job in this process, and in crews that it starts where it is to be spread.

    The same job gives the same parameters, records and times, bit for bit.

    Args:
        job: what to run.
        directory: of the results; exists.
        watcher: is told of progress and shown the scripts' output.

    Raises:
        UsageError: the cluster has no room.
    """

    def __init__(self, job: VirtualJob, directory: Path, watcher: Watcher) -> None:
        self._job, self._watcher = job, watcher
        cluster = job.cluster
        self._places = place(cluster, num_workers=job.num_workers, num_servers=job.strategy.num_servers())
        self._hosts = cluster.each_host()
        self._host_names = cluster.names()
        self._timeline = EventQueue()
        topology = Wiring(cluster)
        new_network = partial(
            Network, self._timeline, unevenness=cluster.communication.unevenness, seed=job.config.seed
        )
        self._network = new_network(topology)
        self._server_network = new_network(topology.between_workers_and_servers)
        self._meeting = Meeting(
            self._timeline,
            self._network,
            host_of=self._places.workers,
            ranks_by_host=self._places.ranks_by_host,
            messages=new_network(topology.between_workers),
        )
        self._worlds = Worlds(job, self._places)
        backward = BackwardEnds()
        self._scheduler = Scheduler(self._timeline, require_waitable=backward.require_outside)
        self._surroundings = Surroundings(self._scheduler, backward, watcher.on_output)
        self._reporter = DirectoryReporter(directory, self._on_records)
        self._servers = [self._server(index, host) for index, host in enumerate(self._places.servers)]
        self._records = RecordsInOrder(self._reporter.emit)
        self._crews: Sequence[Crew] = ()
        self._deputies: list[Deputy] = []
        self._outcomes: dict[int, Outcome] = {}
        self._dead: set[str] = set()
        self._deaths: list[str] = []  # of processes that workers were computed by, in words
        self._is_ending = False

    def run(self) -> None:
        """Return when every worker has ended well.

        Raises:
            RunFailed: a worker failed, a host did, or nobody can go on; the message says who, at which step, and why.
            UsageError: the script or the run's target asks for something that cannot be had.
            KeyboardInterrupt: the user interrupted the run, which has saved where it was if it could.
        """
        with contextlib.ExitStack() as ends:
            ends.callback(self._reporter.close)
            ends.callback(self._records.close)
            try:
                with (
                    crews_of(self._job) as self._crews,
                    interpreter.interrupts(self._on_interrupt),
                    self._surroundings.in_place(),
                ):
                    self._start()
                    self._simulate()
                    self._end()
            except (RunFailed, UsageError) as failure:
                self._records.close()
                self._reporter.event("failed", error=str(failure))
                raise
            finally:
                for deputy in self._deputies:
                    deputy.close()
        if self._reporter.stop_requested():
            raise KeyboardInterrupt

    def _start(self) -> None:
        details = {"workers": self._names_of(self._places.workers), "servers": self._names_of(self._places.servers)}
        self._reporter.event("started", **details)
        for rank in range(self._job.num_workers):
            self._scheduler.spawn(f"worker-{rank}", partial(self._work, rank), runs_script=not self._crews)
        for host in sorted({*self._places.workers, *self._places.servers}):
            time_s = failure_s(self._job.cluster.compute, seed=self._job.config.seed, host=host)
            if time_s < math.inf:
                self._timeline.at(time_s, self._lose, host)

    def _simulate(self) -> None:
        try:
            self._scheduler.run()
        except Exception:
            self._scheduler.abort("the simulation failed")
            raise

    def _end(self) -> None:
        """Every worker is over, or those that are not cannot go on."""
        stuck = [process for process in self._scheduler.processes if not process.is_over]
        waiting = "; ".join(f"{_spaced(p.name)} waits for {p.waits_for()}" for p in stuck if p.waits_for is not None)
        now_s = self._timeline.now_s
        self._scheduler.abort("the run is ending because another member failed")
        self._records.close()
        if self._dead or any(outcome.error and not outcome.is_consequence for outcome in self._outcomes.values()):
            verdict = judge(
                self._statements(),
                is_training=self._reporter.progress.phase == "training",
                is_synchronous=self._job.strategy.is_lock_step(),
            )
            raise RunFailed("\n".join([str(verdict), *self._deaths])) if self._deaths else verdict
        if stuck:
            raise RunFailed(f"at {now_s:g} s of virtual time nobody can go on: {waiting}")

    # --- workers ------------------------------------------------------------------------------------------------

    def _work(self, rank: int) -> None:
        """What a worker does, or what is done for it."""
        process = self._scheduler.processes[rank]
        collective = self._collective(rank, process)
        store = self._store(process, self._places.workers[rank], collective) if self._servers else None
        if self._crews:
            outcome = self._act(rank, process, collective, store)
        else:
            world = partial(
                self._worlds.of,
                rank,
                process,
                collective=collective,
                store=store,
                reporter=self._reporter,
                before_step=self._require_going,
            )
            outcome = run_in(world, self._job.program)
        self._outcomes[rank] = outcome
        self._is_ending = self._is_ending or outcome.error is not None

    def _act(self, rank: int, process: Process, collective: Collective, store: Store | None) -> Outcome:
        """For a worker that computes in another process."""
        crew = self._crews[rank % len(self._crews)]
        deputy = Deputy(
            rank,
            crew,
            process,
            collective=collective,
            store=store,
            reporter=self._reporter,
            records=self._records,
            say=partial(self._say, process.name),
            is_ending=lambda: self._is_ending,
        )
        self._deputies.append(deputy)
        try:
            return deputy.act()
        except EOFError:
            death = crew.death()
            if death not in self._deaths:
                self._deaths.append(death)
                names = [f"worker-{each}" for each in crew.ranks]
                self._dead |= set(names)
                self._reporter.event("lost", members=names, reason=death)
            return Outcome(num_steps=deputy.num_steps, error=death)
        except Exception as error:
            return outcome_of(error, num_steps=deputy.num_steps)

    def _collective(self, rank: int, process: Process) -> Collective:
        if self._job.num_workers == 1:
            return AloneCollective()
        costs = self._job.cluster.communication
        return VirtualCollective(
            self._meeting,
            process,
            rank=rank,
            operation_s=costs.operation_us * 1e-6,
            message_s=costs.message_us * 1e-6,
        )

    def _store(self, process: Process, host: int, collective: Collective) -> Store:
        carrier = VirtualCarrier(
            self._servers,
            self._server_network,
            process=process,
            host=host,
            request_s=self._job.cluster.communication.request_us * 1e-6,
        )
        return ServerGroup(carrier, collective=collective, configure=self._configure, epoch=EPOCH)

    def _configure(self, layout: Layout, optimizer: OptimizerSpec, ranges: Sequence[KeyRange]) -> None:
        strategy, max_updates = self._job.strategy, self._job.config.max_steps
        for server, pieces in zip(self._servers, ranges, strict=True):
            rule = strategy.admission_rule(num_workers=self._job.num_workers)
            assert rule is not None
            server.core.configure(ServerSpec(layout, pieces, optimizer, rule, max_updates, strategy.aggregator()))

    def _server(self, index: int, host: int) -> VirtualServer:
        return VirtualServer(
            self._timeline,
            self._server_network,
            index=index,
            host=host,
            memory_bytes_per_s=self._hosts[host].memory_gbyte_per_s * 1e9,
            request_s=self._job.cluster.servers.request_us * 1e-6,
            reporter=self._reporter,
        )

    # --- ends ---------------------------------------------------------------------------------------------------

    def _require_going(self) -> None:
        """Nobody begins another step once a worker has failed."""
        if self._is_ending:
            raise Aborted("the run is ending because another member failed")

    def _lose(self, host: int) -> None:
        """A host fails: whoever was on it is gone, and the run ends."""
        names = [f"worker-{rank}" for rank, where in enumerate(self._places.workers) if where == host]
        names += [f"server-{index}" for index, where in enumerate(self._places.servers) if where == host]
        self._dead |= set(names)
        self._is_ending = True
        self._reporter.event("lost", host=self._host_names[host], members=names, virtual_time_s=self._timeline.now_s)
        self._scheduler.abort(f"{self._host_names[host]} failed")

    def _statements(self) -> list[Statement]:
        members = [
            Statement(
                name=process.name,
                pid=None,
                num_steps=self._outcomes[rank].num_steps if rank in self._outcomes else 0,
                outcome=self._outcomes.get(rank),
                is_dead=process.name in self._dead,
            )
            for rank, process in enumerate(self._scheduler.processes)
        ]
        for server in self._servers:
            name = f"server-{server.core.index}"
            members.append(Statement(name, None, server.core.iteration, is_dead=name in self._dead))
        return members

    def _on_interrupt(self) -> None:
        """A first Ctrl-C asks the run to save and end; a second one ends it."""
        if self._reporter.stop_requested():
            raise KeyboardInterrupt
        self._reporter.request_stop()

    # --- those who watch ----------------------------------------------------------------------------------------

    def _say(self, who: str, line: str) -> None:
        with self._surroundings.not_heard():
            self._watcher.on_output(who, line)

    def _on_records(self, records: Sequence[Record], progress: Progress) -> None:
        with self._surroundings.not_heard():
            self._watcher.on_records(records)
            self._watcher.on_progress(progress)

    def _names_of(self, hosts: tuple[int, ...]) -> list[str]:
        return [self._host_names[host] for host in hosts]


def _spaced(name: str) -> str:
    return name.replace("-", " ")
