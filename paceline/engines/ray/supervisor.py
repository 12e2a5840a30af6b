"""One run from start to end: place the processes, watch them, and name who failed."""

import contextlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import final

import ray

from paceline.checkpoint import FILE_NAME
from paceline.checkpoint_files import CheckpointFiles, iteration_of
from paceline.comm.connecting import transport
from paceline.engines.blame import judge
from paceline.engines.ray import starting
from paceline.engines.ray.answers import Answers
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.elastic_members import ElasticMembers
from paceline.engines.ray.hearing import TURN_S, Hearing
from paceline.engines.ray.interrupts import Insisted, Interrupted, hold_back_interrupts, note_interrupts
from paceline.engines.ray.job import Job
from paceline.engines.ray.liveness import MemoryKills, Watch
from paceline.engines.ray.members import Members
from paceline.engines.ray.nodes import own_address, own_node_id
from paceline.engines.ray.sweeping import sweep
from paceline.engines.ray.takeover import Takeover
from paceline.engines.ray.world_spec import ServerInfo, WorkerInfo, WorldSpec
from paceline.engines.requests import Desk
from paceline.engines.standing import Watcher
from paceline.errors import PacelineError, RunFailed, UsageError
from paceline.messages import Kind

FIRST_EPOCH = 1
_GATHER_S = 1.5  # how long others may take to tell their side once one member has failed
_GRACE_S = 2.0  # how long members have to end by themselves once the run is aborted
_SAVE_S = 7.0  # how long an interrupted run has to save


@final
class Supervisor:
    """Runs one job on the connected cluster; the directory of its results exists."""

    def __init__(self, job: Job, directory: Path, watcher: Watcher) -> None:
        self._job, self._directory, self._watcher = job, directory, watcher
        traits = job.strategy.traits
        self._traits = traits if job.config.elastic is None else traits.when_elastic
        self._members = Members()
        self._watch = Watch()
        self._controller = Controller(
            directory,
            host=own_address(),
            epoch=FIRST_EPOCH,
            on_output=watcher.on_output,
            on_records=watcher.on_records,
            checkpoint=job.checkpoint or b"",
            checkpoints=CheckpointFiles(directory, keep=job.config.keep_checkpoints, best=job.config.keep_best),
        )
        self._is_urgent = False
        self._memory = MemoryKills()
        self._elastic: ElasticMembers | None = None
        self._takeover: Takeover | None = None
        self._answers = Answers(job.config.elastic, lambda: self._controller.progress)
        self._desk = Desk(directory, self._answers)
        self._hearing = Hearing(self._controller, self._members, self._watch, self._desk, watcher)

    def run(self) -> None:
        """Return when every worker has ended well.

        Raises:
            RunFailed: a member died or failed; the message says who, at which step, and why.
            UsageError: the script or the run's target asks for something that cannot be had.
            Interrupted: the user interrupted the run, which has saved where it was if it could.
        """
        try:
            with note_interrupts(self._answers.stop):
                self._start()
                self._attend()
            self._part()
            if self._elastic is not None:
                self._elastic.end()
            self._controller.event("ended")
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Insisted):
                self._is_urgent = True
                self._tell_interrupted()
            else:
                self._save_and_stop()
            why = self._controller.progress.not_saved
            if why is not None:  # a job in a queue, say, must not think that it can go on from there
                raise RunFailed(f"interrupted, and the last checkpoint is not saved: {why}") from None
            saved = iteration_of(self._directory / FILE_NAME)
            progress = self._controller.progress
            raise Interrupted(
                self._directory, saved, how=progress.how_to_go_on, has_begun=progress.phase == "training"
            ) from None
        except PacelineError as failure:
            with contextlib.suppress(KeyboardInterrupt, PacelineError):  # it ends anyway, and is to say why
                self._abort(str(failure))
            self._controller.event("failed", error=str(failure))
            raise
        finally:
            self._end()

    def _start(self) -> None:
        """Place all processes, make the world known, and set everybody to work."""
        job, members = self._job, self._members
        launcher = self._controller.address
        uses_cuda = starting.start(
            job, members, launcher, turn=lambda: self._hearing.turn(timeout_s=0.0), say=self._say
        )
        for name, info in members.infos.items():
            if info.node_id == own_node_id():
                self._watch.add(name, info.pid)
        spec = WorldSpec(
            FIRST_EPOCH,
            tuple(info for info in members.infos.values() if isinstance(info, WorkerInfo)),
            tuple(info for info in members.infos.values() if isinstance(info, ServerInfo)),
            job.strategy,
            job.config,
            job.checkpoint is not None,
            job.num_at_start or job.num_workers,
        )
        program = ray.put(job.program)  # put once, fetched by each worker: a function may bring data along
        if spec.chains is not None:
            self._takeover = Takeover(
                spec.chains,
                self._controller,
                servers=spec.servers,
                why=self._why_lost,
                say=self._say,
                remedy=self._remedy,
            )
        if job.config.elastic is not None:
            if uses_cuda:
                raise UsageError("--elastic is for workers on CPUs so far; leave it out, or use --device cpu")
            self._elastic = ElasticMembers(
                job.config.elastic,
                job,
                self._traits,
                spec=spec,
                program=program,
                controller=self._controller,
                members=members,
                watch=self._watch,
                hearing=self._hearing,
                answers=self._answers,
                takeover=self._takeover,
                say=self._say,
            )
        transport(spec.members)  # refuses what cannot be connected before anybody tries
        threads = [spec.num_threads(rank) for rank in range(spec.size)]
        pids = {name: info.pid for name, info in members.infos.items()}
        if job.launcher_lost is not None:
            self._controller.event("launcher_lost", "launcher", **job.launcher_lost._asdict())
            self._controller.event("resumed", "guard", why=str(job.launcher_lost))
        self._controller.event("started", pids=pids, hosts=spec.num_hosts, threads=threads)
        for name, server in members.servers.items():
            members.pending[server.serve.remote()] = name
        for rank in range(job.num_workers):
            worker = members.actors[f"worker-{rank}"]
            future = worker.run.remote(spec, rank, program, launcher, list(members.servers.values()))
            members.pending[future] = f"worker-{rank}"

    def _attend(self) -> None:
        """Attend until every worker has ended, or the first has failed."""
        while self._members.has_workers_pending:
            self._hearing.turn(timeout_s=TURN_S)
            if self._answers.is_asked_to_stop:
                raise KeyboardInterrupt
            self._controller.raise_write_error()
            self._hearing.collect()
            if self._elastic is not None:
                # A first interrupt waits until all know who is lost, which the run then saves; a second one does not.
                with hold_back_interrupts(patience=1):
                    self._elastic.survive()
            if self._takeover is not None:
                self._takeover.turn(self._members)
                self._takeover.spread()
            if self._elastic is not None:
                self._elastic.turn_new_servers()
            if self._members.has_failure:
                self._fail()
            if not self._traits.lock_step:  # there every wait has its deadline
                self._require_steps()

    def _say(self, line: str) -> None:
        self._watcher.on_output("run", line)

    def _why_lost(self, server: str) -> str:
        if self._elastic is None:
            return f"its process ended{self._memory.told_since()}"
        return self._elastic.why(server)

    def _abort(self, reason: str, *, besides: Collection[str] = ()) -> None:
        """Tell all who are left why the run ends, once, and let their workers end, but these."""
        if self._is_urgent:
            return
        self._is_urgent = True
        self._controller.tell_all(Kind.ABORT, reason=reason)
        members = self._members
        self._hearing.gather(
            lambda: set(members.pending.values()) <= {*besides, *members.servers, *members.dead}, limit_s=_GRACE_S
        )

    def _remedy(self) -> str:
        iteration = iteration_of(self._directory / FILE_NAME)
        if self._controller.progress.how_to_go_on:
            return self._controller.progress.how_to_go_on
        if iteration is None:
            return f"{self._directory} has no checkpoint yet to go on from"
        return f"--resume {self._directory} goes on from its checkpoint of iteration {iteration}"

    def _part(self) -> None:
        """All workers have ended well: end the servers, and hear everybody's last records."""
        if self._elastic is not None:
            self._elastic.give_up_new_servers()
        for server in self._members.servers.values():
            server.stop.remote()
        self._hearing.hear_last_words(set(self._members.actors))
        self._controller.finish_records()

    def _fail(self) -> None:
        """Hear who else has something to say, end everybody, and raise the cause rather than a consequence."""
        self._hearing.gather(lambda: self._members.has_cause, limit_s=_GATHER_S)
        members = self._members
        # Those who waited for the dead or the hanging say at which step they were.
        self._abort("the run is ending because another member failed")
        raise judge(
            [self._hearing.statement(name) for name in members.actors],
            is_training=self._controller.progress.phase == "training",
            is_synchronous=self._traits.lock_step,
            besides=self._memory.told_since(),
        )

    def _require_steps(self) -> None:
        """Raises RunFailed if a worker that others wait for has made no step within the deadline."""
        now_s, deadline_s = time.monotonic(), self._job.config.deadline_s
        workers = [name for name in self._members.pending.values() if name.startswith("worker")]
        silent = [name for name in workers if self._controller.standstill.still_for(name, now_s=now_s) > deadline_s]
        if not silent:
            return
        hanging = [self._hearing.statement(name) for name in silent]
        text = ", ".join(f"{member.who} hangs after step {member.num_steps}" for member in hanging)
        self._abort("the run is ending because another member hangs", besides=silent)
        raise RunFailed(
            f"{text}: no step for {deadline_s:g} s, while the others are done and wait; see what keeps it, or give a "
            "longer --deadline"
        )

    def _tell_interrupted(self) -> bool:
        """Record it, of a run that has begun to train; whether it has."""
        is_training = self._controller.progress.phase == "training"
        if is_training:
            self._controller.event("interrupted")
        return is_training

    def _save_and_stop(self) -> None:
        """Let an interrupted run save itself; a second interrupt ends it at once."""
        try:
            if self._tell_interrupted():
                self._controller.tell_all(Kind.STOP)
                members = self._members
                if self._elastic is not None:
                    self._elastic.give_up_newcomers()  # others may wait for one
                self._hearing.gather(self._is_settled, limit_s=_SAVE_S)
                if self._controller.finish_files(limit_s=_SAVE_S):  # on a slow disk, for which workers have waited
                    self._hearing.gather(self._is_settled, limit_s=_SAVE_S)
                if not members.has_workers_pending:
                    self._hearing.hear_last_words(members.actors.keys() - members.servers.keys())
            # Whoever has not ended by now will not answer to a friendly word.
            self._is_urgent = self._members.has_workers_pending
        except RunFailed as failure:
            self._abort(str(failure))
        except KeyboardInterrupt:
            self._is_urgent = True

    def _is_settled(self) -> bool:
        """Whether every worker has ended, or a failure keeps one from it."""
        if self._elastic is not None:
            self._elastic.survive()
        if self._takeover is not None:
            self._takeover.turn(self._members)
        return self._members.has_failure or not self._members.has_workers_pending

    def _end(self) -> None:
        """Whatever happened: servers end, no process stays, the files are closed."""
        members = self._members
        if not (self._is_urgent or members.has_failure):
            with contextlib.suppress(KeyboardInterrupt):
                for server in members.servers.values():
                    server.stop.remote()
                self._hearing.gather(lambda: members.has_failure, limit_s=_GRACE_S)
        with hold_back_interrupts():
            self._controller.turn(timeout_s=0.0)
            for actor in members.actors.values():
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            self._sweep()
            self._watch.close()
            self._controller.close()
            self._desk.close()  # last: whoever finds nobody here reads the records as the run's end

    def _sweep(self) -> None:
        """End what scripts started and left running: here, and where a member died without ending it itself."""
        members, elsewhere = self._members, set[str]()
        if self._is_urgent or members.has_failure:  # else every member has ended by itself, and its children with it
            elsewhere = {info.node_id for info in members.infos.values()} - {own_node_id()}
        sweep(self._controller.run, elsewhere)
