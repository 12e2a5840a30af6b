"""One run on a virtual cluster, from start to end."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch

from paceline.checkpoint import Checkpoint
from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.config import RunConfig
from paceline.engines.progress import Progress, Watcher
from paceline.engines.scripting import Outcome, Program, outcome_of, run_program
from paceline.engines.verdict import Statement, judge
from paceline.engines.virtual import interpreter
from paceline.engines.virtual.backward import BackwardEnds
from paceline.engines.virtual.cluster import Cluster
from paceline.engines.virtual.collective import VirtualCollective
from paceline.engines.virtual.compute import ComputeTimes, StepCost, failure_s
from paceline.engines.virtual.meeting import Meeting
from paceline.engines.virtual.network import Network
from paceline.engines.virtual.output import OutputByLine
from paceline.engines.virtual.pace import Pace
from paceline.engines.virtual.process import Process, Scheduler
from paceline.engines.virtual.reporter import DirectoryReporter
from paceline.engines.virtual.server import VirtualServer
from paceline.engines.virtual.store import VirtualStore
from paceline.engines.virtual.timeline import Timeline
from paceline.engines.virtual.topology import Topology, place
from paceline.engines.world import World, enter_here
from paceline.errors import Aborted, RunFailed, UsageError
from paceline.records import Record
from paceline.server.admission import AdmissionRule
from paceline.strategies.base import Context, Strategy


@dataclass(frozen=True)
class VirtualJob:
    """What a run needs to know."""

    program: Program
    strategy: Strategy
    num_workers: int
    cluster: Cluster
    config: RunConfig
    checkpoint: bytes | None = None


@final
class VirtualRun:
    """Runs one job in this process. The same job gives the same parameters, records and times, bit for bit.

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
        self._timeline = Timeline()
        topology = Topology(cluster)
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
        )
        self._device = _device(job.config)
        self._backward = BackwardEnds()
        self._scheduler = Scheduler(self._timeline, require_waitable=self._backward.require_outside)
        self._reporter = DirectoryReporter(directory, self._on_records)
        self._servers = [self._server(index, host) for index, host in enumerate(self._places.servers)]
        self._worlds: dict[int, World] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._dead: set[str] = set()
        self._is_ending = False
        self._is_saying = False

    def run(self) -> None:
        """Return when every worker has ended well.

        Raises:
            RunFailed: a worker failed, a host did, or nobody can go on; the message says who, at which step, and why.
            UsageError: the script or the run's target asks for something that cannot be had.
            KeyboardInterrupt: the user interrupted the run, which has saved where it was if it could.
        """
        try:
            with self._surroundings():
                self._start()
                self._simulate()
                self._end()
        except (RunFailed, UsageError) as failure:
            self._reporter.event("failed", error=str(failure))
            raise
        finally:
            self._reporter.close()
        if self._reporter.stop_requested():
            raise KeyboardInterrupt

    def _start(self) -> None:
        details = {"workers": self._names_of(self._places.workers), "servers": self._names_of(self._places.servers)}
        self._reporter.event("started", **details)
        for rank in range(self._job.num_workers):
            self._scheduler.spawn(f"worker-{rank}", partial(self._work, rank))
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
        if self._dead or any(outcome.error and not outcome.is_consequence for outcome in self._outcomes.values()):
            raise judge(
                self._statements(),
                is_training=self._reporter.progress.phase == "training",
                is_synchronous=self._job.strategy.is_lock_step(),
            )
        if stuck:
            raise RunFailed(f"at {now_s:g} s of virtual time nobody can go on: {waiting}")

    # --- workers ------------------------------------------------------------------------------------------------

    def _work(self, rank: int) -> None:
        """What a worker does."""
        process = self._scheduler.processes[rank]
        try:
            world = self._world(rank, process)
            self._worlds[rank] = world
            enter_here(world)
            run_program(self._job.program)
            for finish in world.at_end:
                finish()
            self._outcomes[rank] = Outcome(num_steps=world.progress())
        except BaseException as error:
            num_steps = self._worlds[rank].progress() if rank in self._worlds else 0
            self._outcomes[rank] = outcome_of(error, num_steps=num_steps)
            self._is_ending = True
        finally:
            enter_here(None)

    def _world(self, rank: int, process: Process) -> World:
        job, host = self._job, self._places.workers[rank]
        local_ranks = next(ranks for ranks in self._places.ranks_by_host if rank in ranks)
        collective: Collective = AloneCollective()
        if job.num_workers > 1:
            costs = job.cluster.communication
            collective = VirtualCollective(
                self._meeting,
                process,
                rank=rank,
                operation_s=costs.operation_us * 1e-6,
                message_s=costs.message_us * 1e-6,
            )
        pace = Pace(
            process,
            ComputeTimes(job.cluster.compute, seed=job.config.seed, rank=rank),
            StepCost(
                job.cluster,
                self._hosts[host],
                num_sharing=len(local_ranks),
                num_hosts=len(self._places.ranks_by_host),
            ),
            compute=job.cluster.compute,
            before_step=self._require_going,
        )
        context = Context(
            rank=rank,
            size=job.num_workers,
            local_rank=local_ranks.index(rank),
            local_size=len(local_ranks),
            device=self._device,
            collective=collective,
            store=self._store(process, host, collective) if self._servers else None,
            now_s=lambda: process.now_s,
            watch=pace.watch,
        )
        checkpoint = Checkpoint.decode(job.checkpoint, where="the checkpoint") if job.checkpoint is not None else None
        return World(context, job.strategy, job.config, self._reporter, checkpoint)

    def _store(self, process: Process, host: int, collective: Collective) -> VirtualStore:
        return VirtualStore(
            self._servers,
            self._server_network,
            request_s=self._job.cluster.communication.request_us * 1e-6,
            collective=collective,
            process=process,
            host=host,
            is_local=len({*self._places.workers, *self._places.servers}) == 1,
            new_rule=self._new_rule,
            max_updates=self._job.config.max_steps,
        )

    def _new_rule(self) -> AdmissionRule:
        rule = self._job.strategy.admission_rule(num_workers=self._job.num_workers)
        assert rule is not None
        return rule

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
            name = f"server-{server.index}"
            num_updates = server.parts[-1].shard.iteration if server.parts else 0
            members.append(Statement(name, None, num_updates, is_dead=name in self._dead))
        return members

    def _on_interrupt(self) -> None:
        """A first Ctrl-C asks the run to save and end; a second one ends it."""
        if self._reporter.stop_requested():
            raise KeyboardInterrupt
        self._reporter.request_stop()

    # --- surroundings -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Scripts find each their own random state, output and time; all is as before at the end."""
        out = OutputByLine(self._who, self._say, sys.stdout)
        err = OutputByLine(self._who, self._say, sys.stderr)
        with interpreter.kept(), interpreter.sleeping(self._sleep), interpreter.interrupts(self._on_interrupt):
            with self._backward.in_place(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
            out.finish()
            err.finish()

    def _who(self) -> str | None:
        """Whose words they are; the watcher's own are nobody's."""
        running = self._scheduler.running
        return running.name if running is not None and not self._is_saying else None

    def _say(self, who: str, line: str) -> None:
        with self._not_heard():
            self._watcher.on_output(who, line)

    def _on_records(self, records: Sequence[Record], progress: Progress) -> None:
        with self._not_heard():
            self._watcher.on_records(records)
            self._watcher.on_progress(progress)

    @contextlib.contextmanager
    def _not_heard(self) -> Iterator[None]:
        """What the watcher prints is not what the worker prints that runs."""
        before, self._is_saying = self._is_saying, True
        try:
            yield
        finally:
            self._is_saying = before

    def _sleep(self, duration_s: float) -> bool:
        """A script's sleep: a wait for nothing but its end."""
        process = self._scheduler.running
        if process is None or not process.is_running:
            return False
        process.advance(max(0.0, duration_s))
        return True

    def _names_of(self, hosts: tuple[int, ...]) -> list[str]:
        return [self._host_names[host] for host in hosts]


def _spaced(name: str) -> str:
    return name.replace("-", " ")


def _device(config: RunConfig) -> torch.device:
    """All workers' device: that of the machine that simulates them."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU; use --device cpu")
    uses_cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if uses_cuda else torch.device("cpu")
