"""One run from start to end: place the processes, watch them, and name who failed."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.comm.wire import Kind
from paceline.config import RunConfig
from paceline.engines.ray.actors import ServerActor, WorkerActor, WorldSpec
from paceline.engines.ray.cluster import Place, nodes, own_address, place
from paceline.engines.ray.controller import Controller, Progress
from paceline.engines.ray.scripting import Outcome, Program
from paceline.errors import RunFailed, UsageError
from paceline.records import EventRecord
from paceline.strategies.base import Strategy

FIRST_EPOCH = 1
_TURN_S = 0.05
_START_S = 120.0
_GATHER_S = 1.5  # how long others may take to tell their side once one member has failed
_GRACE_S = 2.0  # how long members have to end by themselves once the run is aborted
_SAVE_S = 7.0  # how long an interrupted run has to save


class Watcher(Protocol):
    """Who looks on: a progress bar, or nobody."""

    def on_progress(self, progress: Progress) -> None: ...

    def on_output(self, who: str, line: str) -> None: ...


@dataclass(frozen=True)
class Job:
    """What a run needs to know."""

    program: Program
    strategy: Strategy
    num_workers: int
    config: RunConfig
    checkpoint: bytes | None = None


@dataclass
class _Members:
    """The run's actors by name, and what they were asked to do."""

    actors: dict[str, Any] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    pending: dict[Any, str] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    died: dict[str, str] = field(default_factory=dict)


@final
class Supervisor:
    """Runs one job on the connected cluster.

    Args:
        job: what to run.
        directory: of the results; exists.
        watcher: is told of progress and shown the scripts' output.
    """

    def __init__(self, job: Job, directory: Path, watcher: Watcher) -> None:
        self._job, self._watcher = job, watcher
        self._members = _Members()
        self._controller = Controller(
            directory, host=own_address(), epoch=FIRST_EPOCH, on_output=watcher.on_output
        )

    def run(self) -> None:
        """Return when every worker has ended well.

        Raises:
            RunFailed: a member died or failed; the message says who, at which step, and why.
            KeyboardInterrupt: the user interrupted the run, which has saved where it was if it could.
        """
        try:
            self._start()
            self._watch()
        except KeyboardInterrupt:
            self._save_and_stop()
            raise
        except RunFailed as failure:
            self._record("failed", {"error": str(failure)})
            raise
        finally:
            self._end()

    def _start(self) -> None:
        """Place all processes, make the world known, and set everybody to work."""
        job = self._job
        hosts = nodes()
        uses_cuda = _uses_cuda(job.config.device, sum(host.num_gpus for host in hosts))
        workers, servers = place(
            hosts, num_workers=job.num_workers, num_servers=job.strategy.num_servers(), wants_gpus=uses_cuda
        )
        launcher = self._controller.address
        for rank, where in enumerate(workers):
            self._members.actors[f"worker-{rank}"] = _actor(WorkerActor, where).remote()
        for index, where in enumerate(servers):
            self._members.actors[f"server-{index}"] = _actor(ServerActor, where, max_concurrency=3).remote(launcher, index)
        infos = self._hello()
        names = list(self._members.actors)
        self._members.pids = {name: infos[name].pid for name in names}
        spec = WorldSpec(
            FIRST_EPOCH,
            tuple(infos[name] for name in names if name.startswith("worker")),
            tuple(infos[name] for name in names if name.startswith("server")),
            job.strategy,
            job.config,
            uses_cuda,
        )
        self._record("started", {"pids": self._members.pids, "hosts": spec.num_hosts})
        server_actors = [actor for name, actor in self._members.actors.items() if name.startswith("server")]
        for actor, name in zip(server_actors, [n for n in names if n.startswith("server")], strict=True):
            self._members.pending[actor.serve.remote()] = name
        # Put once, fetched by each worker: the program and the checkpoint may be large.
        program, checkpoint = ray.put(job.program), ray.put(job.checkpoint)
        for rank in range(job.num_workers):
            actor = self._members.actors[f"worker-{rank}"]
            future = actor.run.remote(spec, rank, program, launcher, server_actors, checkpoint)
            self._members.pending[future] = f"worker-{rank}"

    def _hello(self) -> dict[str, Any]:
        waiting = {actor.hello.remote(): name for name, actor in self._members.actors.items()}
        infos: dict[str, Any] = {}
        give_up_s = time.monotonic() + _START_S
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_TURN_S)
            for future in ready:
                name = waiting.pop(future)
                try:
                    infos[name] = ray.get(future)
                except RayError as error:
                    raise RunFailed(f"{name} could not be started: {_last_line(error)}") from error
            self._turn(timeout_s=0.0)
            if time.monotonic() > give_up_s:
                missing = ", ".join(sorted(waiting.values()))
                raise RunFailed(
                    f"{missing} did not start within {_START_S:g} s; the cluster may have no room: see `ray status`"
                )
        return infos

    def _watch(self) -> None:
        """Until every worker has ended, or the first has failed."""
        members = self._members
        while any(name.startswith("worker") for name in members.pending.values()):
            self._turn(timeout_s=_TURN_S)
            self._controller.raise_write_error()
            self._collect(timeout_s=0.0)
            if self._failures():
                self._fail()

    def _turn(self, *, timeout_s: float) -> None:
        self._controller.turn(timeout_s=timeout_s)
        self._watcher.on_progress(self._controller.progress)

    def _collect(self, *, timeout_s: float) -> None:
        """Take the results of members that have ended."""
        members = self._members
        if not members.pending:
            return
        ready, _ = ray.wait(list(members.pending), num_returns=len(members.pending), timeout=timeout_s)
        for future in ready:
            name = members.pending.pop(future)
            try:
                members.outcomes[name] = ray.get(future)
            except RayTaskError as error:
                members.outcomes[name] = Outcome(_last_line(error), str(error), kind="RayTaskError")
            except (RayActorError, RayError) as error:
                members.died[name] = _last_line(error)

    def _failures(self) -> bool:
        return bool(self._members.died) or any(o.error is not None for o in self._members.outcomes.values())

    def _fail(self) -> None:
        """Hear the others, end them, and raise the cause rather than a consequence."""
        until_s = time.monotonic() + _GATHER_S
        while not self._has_cause() and self._members.pending and time.monotonic() < until_s:
            self._turn(timeout_s=_TURN_S)
            self._collect(timeout_s=0.0)
        message = self._explain()
        self._abort(message.splitlines()[0])
        raise RunFailed(message)

    def _has_cause(self) -> bool:
        outcomes = self._members.outcomes.values()
        return bool(self._members.died) or any(o.error and not o.is_consequence for o in outcomes)

    def _explain(self) -> str:
        members = self._members
        if members.died:
            return "\n".join(f"{self._who(name)} died {self._when(name)}" for name in sorted(members.died))
        failed = {name: outcome for name, outcome in members.outcomes.items() if outcome.error is not None}
        causes = {name: outcome for name, outcome in failed.items() if not outcome.is_consequence} or failed
        # Where every rank reports the same trouble, the one that names its own tensor or rank knows most.
        name = min(causes, key=lambda name: ("another rank" in str(causes[name].error), name))
        outcome = causes[name]
        text = f"{self._who(name)} failed at step {outcome.step}: {outcome.error}"
        is_own_message = outcome.kind in ("UsageError", "NonFiniteGradient", "TensorMismatch")
        return text if is_own_message else f"{text}\n\n{outcome.traceback}"

    def _who(self, name: str) -> str:
        pid = self._members.pids.get(name)
        return f"{name.replace('-', ' ')} (process {pid})" if pid else name.replace("-", " ")

    def _when(self, name: str) -> str:
        heard = self._controller.members.get(name)
        if heard is None:
            return "before its first step"
        # What synchronous peers say of the step they were in is newer than the last pulse.
        ago_s = time.monotonic() - heard.heard_s
        unit = "step" if name.startswith("worker") else "update"
        return f"after {unit} {heard.step} (last heard of {ago_s:.1f} s before)"

    def _save_and_stop(self) -> None:
        """Let an interrupted run save itself; a second interrupt ends it at once."""
        with contextlib.suppress(KeyboardInterrupt, RunFailed):
            if self._controller.progress.phase == "training":
                self._record("interrupted", {})
                self._controller.tell_all(Kind.STOP)
                until_s = time.monotonic() + _SAVE_S
                while any(n.startswith("worker") for n in self._members.pending.values()):
                    if time.monotonic() > until_s or self._failures():
                        break
                    self._turn(timeout_s=_TURN_S)
                    self._collect(timeout_s=0.0)

    def _abort(self, reason: str) -> None:
        """Ask everybody to end, so that scripts can clean up."""
        self._controller.tell_all(Kind.ABORT, reason=reason)
        until_s = time.monotonic() + _GRACE_S
        while self._members.pending and time.monotonic() < until_s:
            self._controller.turn(timeout_s=_TURN_S)
            self._collect(timeout_s=0.0)

    def _end(self) -> None:
        """Whatever happened: servers end, no process stays, the files are closed."""
        with contextlib.suppress(KeyboardInterrupt):
            servers = [actor for name, actor in self._members.actors.items() if name.startswith("server")]
            for actor in servers:
                actor.stop.remote()
            until_s = time.monotonic() + _GRACE_S
            while self._members.pending and not self._failures() and time.monotonic() < until_s:
                self._controller.turn(timeout_s=_TURN_S)
                self._collect(timeout_s=0.0)
            self._controller.turn(timeout_s=0.0)
        for actor in self._members.actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._controller.close()

    def _record(self, name: str, details: dict[str, Any]) -> None:
        progress = self._controller.progress
        self._controller.record(EventRecord(name, "run", progress.iteration, progress.time_s, details))


def _actor(kind: type, where: Place, **options: Any) -> Any:
    affinity = NodeAffinitySchedulingStrategy(where.node.node_id, soft=False)
    configured = cast(Any, ray.remote)(
        num_cpus=where.num_cpus,
        num_gpus=where.num_gpus,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=affinity,
        **options,
    )
    return configured(kind)


def _uses_cuda(device: str, num_gpus: float) -> bool:
    if device == "cuda" and num_gpus == 0:
        raise UsageError("--device cuda: no node of the cluster has a GPU; use --device cpu")
    return device != "cpu" and num_gpus > 0


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
