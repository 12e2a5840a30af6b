"""One run on a virtual cluster, from start to end."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from paceline.comm.rank_errors import ALIKE
from paceline.elastic import LaneBook
from paceline.elastic.lane_book import in_words
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
from paceline.engines.virtual.survival.outliving import Outliving
from paceline.engines.virtual.survival.roll import Roll
from paceline.engines.virtual.worlds import Worlds
from paceline.engines.world import World, enter_here
from paceline.errors import Aborted, CallMismatch, RunFailed, UsageError
from paceline.membership import Membership
from paceline.records import Record
from paceline.seeding import derive

_ENDING = "the run is ending because another member failed"


@dataclass(frozen=True)
class LostHost:
    """A host whose failure, or preemption, has ended a run."""

    host: str
    at_s: float
    """Virtual time since the run began."""
    down_s: float
    """Time until the run can begin anew; infinite: never."""


@final
class VirtualRun:
    """Runs one job in this process. The same job gives the same parameters, records and times, bit for bit.

    Raises UsageError if the cluster has no room for the job, or this machine lacks the device that it asks for.
    """

    def __init__(
        self, job: VirtualJob, directory: Path, watcher: Watcher, *, ledger: Ledger | None = None, attempt: int = 0
    ) -> None:
        """`attempt`: how often it has begun before; what was counted then goes on in `ledger`."""
        self._job, self._watcher = job, watcher
        self.ledger, self.attempt = ledger or Ledger(), attempt
        self.lost: LostHost | None = None
        """The host without which the run could not go on; none: it has not lost one."""
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
        self._is_ending = self._has_told_of_stop = False
        self._processes: dict[int, Process] = {}  # by rank, as are worlds
        self._present: dict[int, World] = {}
        self._fleet = self._roll = None
        self._book: LaneBook | None = None
        if job.config.elastic is not None:
            traits, outliving = job.strategy.traits.when_elastic, None
            if traits.has_lanes:
                self._book = LaneBook(job.num_workers)
            if self._book is not None and traits.outlives_workers:
                outliving = Outliving(self._worlds.servers, self._book, event=self._reporter.event)
            self._roll = Roll(
                job.config.elastic,
                self._timeline,
                self.ledger,
                membership=Membership.first(job.num_workers),
                reform_s=job.cluster.recovery.reform_s,
                meet=lambda membership: self._worlds.meet(membership.ranks),
                epoch_of=lambda rank: self._present[rank].epoch(),
                event=self._reporter.event,
                book=self._book,
                outliving=outliving,
            )
            self._fleet = Fleet(
                job.cluster,
                job.config.elastic,
                self._timeline,
                self._roll,
                self.ledger,
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
                self._tell_left_over()
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
        if self._fleet is None:
            for rank, host in enumerate(places.workers):
                self.ledger.begins(rank, self._timeline.now_s, price_per_hour=self._price_per_hour(host))
        cluster, fleet = self._job.cluster, self._fleet
        lives = Lives(
            cluster,
            self._timeline,
            seed=derive(self._job.config.seed, "attempt", self.attempt) if self.attempt else self._job.config.seed,
            on_notice=self._notice,
            on_gone=self._lose,
            on_back=fleet.come_back if fleet is not None else lambda host: None,
        )
        lives.begin(range(cluster.num_hosts) if fleet is not None else sorted({*places.workers, *places.servers}))

    def _spawn(self, rank: int) -> None:
        self._processes[rank] = self._scheduler.spawn(f"worker-{rank}", partial(self._work, rank))

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
        if self._dead or any(outcome.error for outcome in self._outcomes.values()):
            raise judge(
                self._statements(),
                is_training=self._is_training,
                is_synchronous=self._job.strategy.traits.lock_step,
            )
        if stuck:
            raise RunFailed(str(lockup))

    # --- workers ------------------------------------------------------------------------------------------------

    def _work(self, rank: int) -> None:
        """Run a worker's program in a world of its own, and note how that ended."""
        world: World | None = None
        try:
            process = self._processes[rank]
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

    @property
    def _is_training(self) -> bool:
        """Whether all workers have come to their first step."""
        return self._reporter.progress.phase == "training"

    def _notice(self, host: int, notice_s: float) -> None:
        """The host will be taken away. Before all train nobody can leave or join: its workers then die with it."""
        if self._fleet is not None and self._is_training:
            self._fleet.notice(host, notice_s)

    def _lose(self, host: int) -> None:
        """A host is gone, and its workers and servers are dead: the others go on, or the run ends."""
        places = self._worlds.places
        can_go_on = host not in places.servers
        if self._fleet is not None and can_go_on and self._is_training:
            self._fleet.go(host)
            return
        names = [f"worker-{rank}" for rank, where in enumerate(places.workers) if where == host]
        names += [f"server-{index}" for index, where in enumerate(places.servers) if where == host]
        if not names:
            return
        self._dead |= set(names)
        self._is_ending = True
        self.lost = LostHost(self._host_names[host], self._timeline.now_s, self._down_s(host))
        self.ledger.close(self._timeline.now_s)
        self._reporter.event("lost", host=self._host_names[host], members=names, virtual_time_s=self._timeline.now_s)
        self._scheduler.abort(Aborted(f"{self._host_names[host]} failed"))

    def _kill(self, rank: int) -> bool:
        """End a worker's process, without whom others go on; false where its program was over."""
        self._lost.add(rank)
        process = self._processes.get(rank)
        if process is not None:
            if process.is_over:
                return False
            self._scheduler.end(process, Aborted("its host is gone"))
        return True

    def begins_anew(self, *, host: str, iteration: int, again_s: float, down_s: float) -> None:
        """The host was lost, and the run goes on from a checkpoint: so much is done again, after so long."""
        places = self._worlds.places
        price_per_hour = sum(map(self._price_per_hour, places.workers))
        self.ledger.waits(self._job.num_workers, again_s=again_s, down_s=down_s, price_per_hour=price_per_hour)
        self._reporter.event("restarted", host=host, checkpoint=iteration, again_s=again_s, down_s=down_s)
        self._say(f"{host} is lost; the run begins anew from iteration {iteration}, {down_s:g} s later")

    def _tell_left_over(self) -> None:
        """All have come to the end of their scripts: what nobody has done."""
        if self._book is None:
            return
        left = self._book.left_over(world.epoch() for world in self._present.values())
        if left:
            self._reporter.event("left_over", "run", batches=[each._asdict() for each in left])
            self._say(in_words(left))

    def _tell_goodput(self) -> None:
        if self._fleet is None and not self._job.cluster.can_fail:
            return
        self.ledger.close(self._timeline.now_s)
        self._reporter.event("goodput", virtual_time_s=self._timeline.now_s, **self.ledger.details())

    def _down_s(self, host: int) -> float:
        """Until the run can begin anew: on a host that is free, or when this one is back."""
        cluster, places = self._job.cluster, self._worlds.places
        back_after_s = cluster.each_host()[host].back_after_s
        num_taken = len(places.workers) + len(set(places.servers) - set(places.workers))
        if cluster.num_slots > num_taken:
            back_after_s = 0.0
        return cluster.recovery.start_s + (math.inf if back_after_s is None else back_after_s)

    def _price_per_hour(self, host: int) -> float:
        """What a worker's part of this host costs."""
        return self._job.cluster.each_host()[host].worker_per_hour

    def _say(self, line: str) -> None:
        with self._surroundings.not_heard():
            self._watcher.on_output("run", line)

    def _statements(self) -> list[Statement]:
        members = []
        for rank, process in self._processes.items():
            outcome = self._outcomes.get(rank)
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
        if self._reporter.stop_requested() and not self._has_told_of_stop:
            self._has_told_of_stop = True  # here, since a signal's handler may not print
            self._say("interrupted: it ends where all workers may, and saves; a second Ctrl-C ends it at once")
        with self._surroundings.not_heard():
            self._watcher.on_records(records)
            self._watcher.on_progress(progress)

    def _names_of(self, hosts: Iterable[int]) -> list[str]:
        return [self._host_names[host] for host in hosts]


def _spaced(name: str) -> str:
    return name.replace("-", " ")
