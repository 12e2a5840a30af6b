"""One run on a virtual cluster, from start to end."""

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import final

from paceline.comm.rank_errors import ALIKE
from paceline.engines.blame import Statement, judge
from paceline.engines.directory_reporter import DirectoryReporter
from paceline.engines.scripting import Outcome, outcome_of, run_program
from paceline.engines.standing import Progress, Watcher
from paceline.engines.virtual.computing.backward import BackwardEnds
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.isolation import interpreter
from paceline.engines.virtual.isolation.surroundings import Surroundings
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.process import Process, Scheduler
from paceline.engines.virtual.survival.fleet import Fleet
from paceline.engines.virtual.survival.ledger import Ledger
from paceline.engines.virtual.survival.lives import Lives
from paceline.engines.virtual.survival.roll import Roll
from paceline.engines.virtual.worlds import Worlds
from paceline.engines.world import World, enter_here
from paceline.errors import Aborted, CallMismatch, RunFailed, UsageError
from paceline.membership import Membership
from paceline.records import Record

_ENDING = "the run is ending because another member failed"


@final
class VirtualRun:
    """Runs one job in this process. The same job gives the same parameters, records and times, bit for bit.

    Raises UsageError if the cluster has no room for the job, or this machine lacks the device that it asks for.
    """

    def __init__(self, job: VirtualJob, directory: Path, watcher: Watcher) -> None:
        self._job, self._watcher = job, watcher
        self._host_names = job.cluster.names()
        self._timeline = EventQueue()
        self._reporter = DirectoryReporter(directory, job.config, self._on_records)
        self._worlds = Worlds(job, self._timeline, self._reporter)
        backward = BackwardEnds()
        self._scheduler = Scheduler(
            self._timeline, require_waitable=backward.require_outside, can_wait=backward.is_outside
        )
        self._surroundings = Surroundings(self._scheduler, backward, watcher.on_output)
        self._outcomes: dict[int, Outcome] = {}
        self._dead: set[str] = set()
        self._lost: set[int] = set()  # ranks without whom others go on
        self._is_ending = False
        self._present: dict[int, World] = {}
        self._ledger = Ledger()
        self._fleet = self._roll = None
        if job.config.elastic is not None:
            self._roll = Roll(
                job.config.elastic,
                self._timeline,
                self._ledger,
                membership=Membership.first(job.num_workers),
                reform_s=job.cluster.recovery.reform_s,
                meet=lambda membership: self._worlds.meet(membership.ranks),
                epoch_of=lambda rank: self._present[rank].epoch(),
                event=self._reporter.event,
            )
            self._fleet = Fleet(
                job.cluster,
                job.config.elastic,
                self._timeline,
                self._roll,
                self._ledger,
                host_of=self._worlds.host_of,
                spawn=self._spawn,
                kill=self._kill,
                event=self._reporter.event,
                say=self._say,
            )

    def run(self) -> None:
        """Return when every worker has ended well.

        Raises:
            RunFailed: a worker failed, a host did, or nobody can go on; the message says who, at which step, and why.
            UsageError: the script or the run's target asks for something that cannot be had.
            KeyboardInterrupt: the user interrupted the run, which has saved where it was if it could.
        """
        with contextlib.closing(self._reporter):
            try:
                with interpreter.interrupts(self._on_interrupt), self._surroundings.in_place():
                    self._start()
                    self._simulate()
                    self._end()
                self._tell_goodput()
                self._reporter.event("interrupted" if self._reporter.stop_requested() else "ended")
            except (RunFailed, UsageError) as failure:
                self._reporter.event("failed", error=str(failure))
                raise
        if self._reporter.stop_requested():
            raise KeyboardInterrupt

    def _start(self) -> None:
        places = self._worlds.places
        self._reporter.event("started", workers=self._names_of(places.workers), servers=self._names_of(places.servers))
        for rank in range(self._job.num_workers):
            self._spawn(rank)
        cluster, fleet = self._job.cluster, self._fleet
        lives = Lives(
            cluster,
            self._timeline,
            seed=self._job.config.seed,
            on_notice=fleet.notice if fleet is not None else lambda host, notice_s: None,
            on_gone=self._lose,
            on_back=lambda host: fleet.replace() if fleet is not None else None,
        )
        if fleet is not None:
            fleet.lives = lives
        lives.begin(range(cluster.num_hosts) if fleet is not None else sorted({*places.workers, *places.servers}))

    def _spawn(self, rank: int) -> None:
        self._scheduler.spawn(f"worker-{rank}", partial(self._work, rank))

    def _simulate(self) -> None:
        try:
            self._scheduler.run()
        except Exception:
            self._scheduler.abort(Aborted("the simulation failed"))
            raise

    def _end(self) -> None:
        """Raises RunFailed, or UsageError for what cannot be had, unless every worker has ended well."""
        stuck = [process for process in self._scheduler.processes if not process.is_over]
        waiting = "; ".join(f"{_spaced(p.name)} waits for {p.waits_for()}" for p in stuck if p.waits_for is not None)
        now_s = self._timeline.now_s
        failed = self._dead or any(outcome.error for outcome in self._outcomes.values())
        lockup = CallMismatch(f"at {now_s:g} s of virtual time nobody can go on: {waiting}; {ALIKE}")
        self._scheduler.abort(Aborted(_ENDING) if failed else lockup)
        if self._dead or any(outcome.error and not outcome.is_consequence for outcome in self._outcomes.values()):
            raise judge(
                self._statements(),
                is_training=self._reporter.progress.phase == "training",
                is_synchronous=self._job.strategy.traits.lock_step,
            )
        if stuck:
            raise RunFailed(str(lockup))

    # --- workers ------------------------------------------------------------------------------------------------

    def _work(self, rank: int) -> None:
        """Run a worker's program in a world of its own, and note how that ended."""
        world: World | None = None
        try:
            process = self._process_of(rank)
            before_step = partial(self._require_going, process)
            world = self._worlds.of(rank, process, before_step=before_step, roll=self._roll)
            self._present[rank] = world
            enter_here(world)
            run_program(self._job.program)
            for finish in world.at_end:
                finish()
            outcome = Outcome(num_steps=world.progress())
        except BaseException as error:
            outcome = outcome_of(error, num_steps=world.progress() if world is not None else 0)
        finally:
            if world is not None:
                world.release()
            enter_here(None)
        if rank in self._lost:
            return
        self._outcomes[rank] = outcome
        self._is_ending = self._is_ending or outcome.error is not None
        if self._fleet is not None:
            self._timeline.at(self._timeline.now_s, self._fleet.end, rank)

    def _require_going(self, process: Process) -> None:
        """Nobody begins another step once a worker has failed. Where workers die, none is ahead of the others by more
        than a step."""
        if self._is_ending:
            raise Aborted(_ENDING)
        if self._fleet is not None:
            process.settle()

    # --- ends ---------------------------------------------------------------------------------------------------

    def _lose(self, host: int) -> None:
        """A host is gone, and its workers and servers are dead: the others go on, or the run ends."""
        if self._fleet is not None and self._reporter.progress.phase == "training":
            self._fleet.go(host)
            return
        places = self._worlds.places
        names = [f"worker-{rank}" for rank, where in enumerate(places.workers) if where == host]
        names += [f"server-{index}" for index, where in enumerate(places.servers) if where == host]
        if not names:
            return
        self._dead |= set(names)
        self._is_ending = True
        self._reporter.event("lost", host=self._host_names[host], members=names, virtual_time_s=self._timeline.now_s)
        self._scheduler.abort(Aborted(f"{self._host_names[host]} failed"))

    def _kill(self, rank: int) -> bool:
        """End a worker's process, without whom others go on; false where it was over, or has not begun."""
        self._lost.add(rank)
        started = [process for process in self._scheduler.processes if process.name == f"worker-{rank}"]
        for process in started:
            if process.is_over:
                return False
            self._scheduler.end(process, Aborted("its host is gone"))
        return True

    def _process_of(self, rank: int) -> Process:
        return next(process for process in self._scheduler.processes if process.name == f"worker-{rank}")

    def _tell_goodput(self) -> None:
        if self._fleet is not None:
            self._ledger.close(self._timeline.now_s)
            self._reporter.event("goodput", virtual_time_s=self._timeline.now_s, **self._ledger.details())

    def _say(self, line: str) -> None:
        with self._surroundings.not_heard():
            self._watcher.on_output("run", line)

    def _statements(self) -> list[Statement]:
        members = []
        for process in self._scheduler.processes:
            outcome = self._outcomes.get(int(process.name.partition("-")[2]))
            num_steps = outcome.num_steps if outcome is not None else 0
            members.append(Statement(process.name, None, num_steps, outcome, is_dead=process.name in self._dead))
        for server in self._worlds.servers:
            name = f"server-{server.core.index}"
            members.append(Statement(name, None, server.core.iteration, is_dead=name in self._dead))
        return members

    def _on_interrupt(self) -> None:
        """A first Ctrl-C asks the run to save and end; a second one ends it."""
        if self._reporter.stop_requested():
            raise KeyboardInterrupt
        self._reporter.request_stop()

    # --- those who watch ----------------------------------------------------------------------------------------

    def _on_records(self, records: Sequence[Record], progress: Progress) -> None:
        with self._surroundings.not_heard():
            self._watcher.on_records(records)
            self._watcher.on_progress(progress)

    def _names_of(self, hosts: Iterable[int]) -> list[str]:
        return [self._host_names[host] for host in hosts]


def _spaced(name: str) -> str:
    return name.replace("-", " ")
