"""One run from start to end: place the processes, watch them, and name who failed."""

import contextlib
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from paceline.checkpoint import FILE_NAME
from paceline.checkpoint_files import CheckpointFiles, iteration_of
from paceline.comm.connecting import transport
from paceline.elastic import Elastic
from paceline.engines.blame import Statement, judge
from paceline.engines.ray import starting
from paceline.engines.ray.answers import Answers
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.interrupts import Interrupted, hold_back_interrupts, note_interrupts
from paceline.engines.ray.job import Job
from paceline.engines.ray.lane_desk import LaneDesk
from paceline.engines.ray.letting_go import LettingGo
from paceline.engines.ray.liveness import MemoryKills, Watch
from paceline.engines.ray.members import Members, last_line
from paceline.engines.ray.new_servers import NewServers
from paceline.engines.ray.newcomers import Newcomers
from paceline.engines.ray.nodes import own_address, own_node_id
from paceline.engines.ray.survival import Survival
from paceline.engines.ray.sweeping import sweep
from paceline.engines.ray.takeover import Takeover
from paceline.engines.ray.world_spec import ServerInfo, WorkerInfo, WorldSpec
from paceline.engines.requests import Desk
from paceline.engines.scripting import Outcome
from paceline.engines.standing import Watcher
from paceline.errors import PacelineError, RunFailed, UsageError
from paceline.messages import Kind

FIRST_EPOCH = 1
_TURN_S = 0.05
_GATHER_S = 1.5  # how long others may take to tell their side once one member has failed
_WORD_S = 5.0  # how long it may take until it is clear that an elastic run has begun, when somebody dies early
_GRACE_S = 2.0  # how long members have to end by themselves once the run is aborted
_FAREWELL_S = 30.0  # how long members that have ended well may take to have their last records heard
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
        self._survival: Survival | None = None
        self._newcomers: Newcomers | None = None
        self._new_servers: NewServers | None = None
        self._lane_desk: LaneDesk | None = None
        self._takeover: Takeover | None = None
        self._answers = Answers(job.config.elastic, lambda: self._controller.progress)
        self._desk = Desk(directory, self._answers)
        self._ended: set[str] = set()
        """Workers that have come to their end, as an elastic run's others know."""

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
            if self._lane_desk is not None:
                self._lane_desk.end()
            self._controller.event("ended")
        except KeyboardInterrupt:
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
        uses_cuda = starting.start(job, members, launcher, turn=lambda: self._turn(timeout_s=0.0))
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
            self._be_elastic(job.config.elastic, spec, program)
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

    def _be_elastic(self, elastic: Elastic, spec: WorldSpec, program: ray.ObjectRef[Any]) -> None:
        """Make ready for members that die, leave and join."""
        job, members, letting_go = self._job, self._members, None
        elsewhere = {
            name
            for name, info in members.infos.items()
            if info.node_id != own_node_id() and (isinstance(info, WorkerInfo) or spec.chains is not None)
        }
        if self._traits.has_lanes:
            self._lane_desk = LaneDesk(self._controller, num_workers=spec.size, say=self._say)
        if self._lane_desk is not None and self._traits.outlives_workers:
            letting_go = LettingGo(
                self._controller,
                members,
                self._lane_desk,
                num_ranges=len(spec.servers) if spec.chains is None else len(spec.chains.chains),
                takeover=self._takeover,
                deadline_s=elastic.deadline_s,
                turn=self._look_after_members,
            )
        self._survival = Survival(
            elastic,
            self._controller,
            membership=spec.membership,
            # Under servers the others may have many steps to go to where they meet; see `_require_steps`.
            deadline_s=math.inf if letting_go is not None else job.config.deadline_s,
            pids={name: info.pid for name, info in members.infos.items()},
            elsewhere=elsewhere,
            desk=self._lane_desk,
            letting_go=letting_go,
            servers=tuple if self._takeover is None else lambda: members.servers.keys() & members.infos.keys(),
            say=self._say,
        )
        self._newcomers = Newcomers(
            elastic,
            self._survival,
            self._controller,
            members,
            self._watch,
            spec=spec,
            program=program,
            environment=job.environment,
            takeover=self._takeover,
            say=self._say,
        )
        if self._takeover is not None:
            self._new_servers = NewServers(
                self._controller,
                members,
                self._watch,
                self._survival,
                self._takeover,
                environment=job.environment,
                replacements=elastic.replacements,
                within_s=job.config.start_deadline_s,
                say=self._say,
            )
        try:
            self._answers.scale_by(self._newcomers, self._new_servers)
        except UsageError as refused:
            self._say(str(refused))

    def _attend(self) -> None:
        """Attend until every worker has ended, or the first has failed."""
        while self._members.has_workers_pending:
            self._turn(timeout_s=_TURN_S)
            if self._answers.is_asked_to_stop:
                raise KeyboardInterrupt
            self._controller.raise_write_error()
            self._collect()
            if self._survival is not None and self._newcomers is not None:
                self._survive(self._survival, self._newcomers)
            if self._takeover is not None:
                self._takeover.turn(self._members)
                self._takeover.spread()
            if self._new_servers is not None:
                self._new_servers.turn()
            if self._members.has_failure:
                self._fail()
            if not self._traits.lock_step:  # there every wait has its deadline
                self._require_steps()

    def _say(self, line: str) -> None:
        self._watcher.on_output("run", line)

    def _survive(self, survival: Survival, newcomers: Newcomers) -> None:
        """Workers that have died are no members any more, and the others go on. Who interrupts the run waits until that
        is so, or does so again: it is to be saved with what all know of one another."""
        with hold_back_interrupts(patience=1):
            self._go_on_without_the_dead(survival, newcomers)

    def _go_on_without_the_dead(self, survival: Survival, newcomers: Newcomers) -> None:
        members = self._members
        self._expel()
        newcomers.turn()
        for name, outcome in members.outcomes.items():
            if outcome.error is None and name not in self._ended:
                self._ended.add(name)
                survival.end(name)
        survival.hear()
        if members.dead and not survival.has_begun:
            # Word of the first step may still be under way; others who have taken it say so when they miss the dead.
            self._gather(lambda: survival.has_begun or members.has_error, limit_s=_WORD_S)
            if not survival.has_begun:
                return
        # Servers' deaths end the run, or others take over, elsewhere.
        for name in sorted(members.dead - members.servers.keys()):
            if name in self._controller.gone | survival.left:
                survival.end(name)
            else:
                survival.lose(name)
            members.forget(name)
            self._controller.forget(name)
            newcomers.replace_lost()
        if not survival.ranks:
            newcomers.give_up_all()
        survival.end_silent()
        survival.require_all()

    def _expel(self) -> None:
        """Who is expelled has died for all others."""
        members = self._members
        for name in self._controller.expelled & members.actors.keys():
            with contextlib.suppress(Exception):
                ray.kill(members.actors[name])
            members.dead.add(name)

    def _look_after_members(self, timeout_s: float) -> None:
        """As a turn does, in the middle of one: who waits for servers goes on when others have taken over."""
        self._controller.turn(timeout_s=timeout_s)  # commands wait for the whole turn
        self._collect()
        if self._survival is not None:
            self._survival.end_silent()
        self._expel()
        if self._takeover is not None:
            self._takeover.turn(self._members)

    def _why_lost(self, server: str) -> str:
        if self._survival is None:
            return f"its process ended{self._memory.told_since()}"
        return self._survival.why(server)

    def _abort(self, reason: str, *, besides: Collection[str] = ()) -> None:
        """Tell all who are left why the run ends, once, and let their workers end, but these."""
        if self._is_urgent:
            return
        self._is_urgent = True
        self._controller.tell_all(Kind.ABORT, reason=reason)
        members = self._members
        self._gather(
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
        if self._new_servers is not None:
            self._new_servers.give_up_all()
        for server in self._members.servers.values():
            server.stop.remote()
        self._hear_last_words(set(self._members.actors))
        self._controller.finish_records()

    def _hear_last_words(self, names: set[str]) -> None:
        """Members that have ended may still have records under way: wait for their goodbyes, which come last.

        The dead have said all they will.
        """
        until_s = time.monotonic() + _FAREWELL_S
        while not names <= self._controller.gone | self._members.dead and time.monotonic() < until_s:
            self._turn(timeout_s=_TURN_S)
            self._collect()

    def _turn(self, *, timeout_s: float) -> None:
        self._controller.turn(timeout_s=timeout_s)
        self._desk.turn()
        self._watcher.on_progress(self._controller.progress)

    def _collect(self) -> None:
        """Take the results of members that have ended, and note those that died."""
        members = self._members
        for name in self._watch.ended():
            if name in members.pending.values():
                members.dead.add(name)
        if not members.pending:
            return
        ready, _ = ray.wait(list(members.pending), num_returns=len(members.pending), timeout=0)
        for future in ready:
            name = members.pending.pop(future)
            try:
                members.outcomes[name] = ray.get(future)
                members.dead.discard(name)
            except RayTaskError as error:
                members.outcomes[name] = Outcome(error=last_line(error), traceback=str(error))
            except (RayActorError, RayError):
                members.dead.add(name)

    def _fail(self) -> None:
        """Hear who else has something to say, end everybody, and raise the cause rather than a consequence."""
        self._gather(lambda: self._members.has_cause, limit_s=_GATHER_S)
        members = self._members
        # Those who waited for the dead or the hanging say at which step they were.
        self._abort("the run is ending because another member failed")
        raise judge(
            [self._statement(name) for name in members.actors],
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
        hanging = [self._statement(name) for name in silent]
        text = ", ".join(f"{member.who} hangs after step {member.num_steps}" for member in hanging)
        self._abort("the run is ending because another member hangs", besides=silent)
        raise RunFailed(
            f"{text}: no step for {deadline_s:g} s, while the others are done and wait; see what keeps it, or give a "
            "longer --deadline"
        )

    def _gather(self, is_enough: Callable[[], bool], *, limit_s: float) -> None:
        """Collect until enough is known, or the time is over."""
        until_s = time.monotonic() + limit_s
        while not is_enough() and self._members.pending and time.monotonic() < until_s:
            self._turn(timeout_s=_TURN_S)
            self._collect()

    def _statement(self, name: str) -> Statement:
        members = self._members
        info = members.infos.get(name)
        return Statement(
            name,
            info.pid if info is not None else None,
            self._controller.num_steps.get(name, 0),
            members.outcomes.get(name),
            is_dead=name in members.dead,
        )

    def _save_and_stop(self) -> None:
        """Let an interrupted run save itself; a second interrupt ends it at once."""
        try:
            if self._controller.progress.phase == "training":
                self._controller.event("interrupted")
                self._controller.tell_all(Kind.STOP)
                members = self._members
                if self._newcomers is not None:
                    self._newcomers.give_up_all()  # others may wait for one
                if self._new_servers is not None:
                    self._new_servers.give_up_all()
                self._gather(self._is_settled, limit_s=_SAVE_S)
                if self._controller.finish_files(limit_s=_SAVE_S):  # on a slow disk, for which workers have waited
                    self._gather(self._is_settled, limit_s=_SAVE_S)
                if not members.has_workers_pending:
                    self._hear_last_words(members.actors.keys() - members.servers.keys())
            # Whoever has not ended by now will not answer to a friendly word.
            self._is_urgent = self._members.has_workers_pending
        except RunFailed as failure:
            self._abort(str(failure))
        except KeyboardInterrupt:
            self._is_urgent = True

    def _is_settled(self) -> bool:
        """Whether every worker has ended, or a failure keeps one from it."""
        if self._survival is not None and self._newcomers is not None:
            self._survive(self._survival, self._newcomers)
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
                self._gather(lambda: members.has_failure, limit_s=_GRACE_S)
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
