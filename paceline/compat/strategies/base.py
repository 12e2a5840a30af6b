"""The base of TensorFlow's strategies: each has a strategy of Paceline's and a number of workers, and runs them."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import paceline
from paceline.compat.strategies.cluster_resolver import TFConfigClusterResolver
from paceline.compat.strategies.shown_errors import show_alone
from paceline.config import DeviceChoice
from paceline.engines.world import current
from paceline.errors import PacelineError, UsageError
from paceline.records import EventRecord
from paceline.running.result import Result
from paceline.strategies import name_of, settings_of
from paceline.strategies.base import Strategy
from paceline.training.worker import Worker

_ELSEWHERE = {
    "experimental_distribute_dataset": "worker.prepare(model, optimizer, loader) divides a DataLoader",
    "distribute_datasets_from_function": "worker.prepare(model, optimizer, loader) divides a DataLoader",
    "experimental_distribute_values_from_function": "each worker computes its own from worker.rank",
    "experimental_local_results": "what a worker computes is its own already",
    "reduce": "worker.all_reduce(tensor)",
    "gather": "worker.all_gather(tensor)",
    "extended": "an optimizer that worker.prepare has been given exchanges in step()",
}
_MOST_NAMED = 3  # hosts in a message, beside the first
_GIVEN_BY_NAME = ("strategy", "workers", "options", "device", "deadline_s")


class DistributionStrategy(ABC):
    """A strategy by one of TensorFlow's names: it says what to run, and is the same in the launcher and in workers.

    In a process that trains (under `paceline run`, `torchrun` or `run`) it is of that world's workers; elsewhere of as
    many as it was made with.

    Args:
        strategy: what Paceline runs.
        workers: how many train; none: as many as the world has, or `default` where there is no world.
        default: as above.
        device: where they compute.
        is_of_one_host: workers on several hosts are refused.
        resolver: the cluster that TensorFlow's variable describes, whose first task alone starts runs.
        hosts: where it says that the workers are; of several, a run on one host alone is refused.
        deadline_s: how long a wait for a peer may take; none: Paceline's own.
        takes_any_servers: a run may have another number of them than the strategy.
    """

    @abstractmethod
    def __init__(
        self,
        strategy: Strategy,
        *,
        workers: int | None,
        default: int = 1,
        device: DeviceChoice = "auto",
        is_of_one_host: bool = False,
        resolver: TFConfigClusterResolver | None = None,
        hosts: Sequence[str] = (),
        deadline_s: float | None = None,
        takes_any_servers: bool = False,
    ) -> None:
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
            raise UsageError(f"{self.name}: workers must be at least 1, not {workers!r}")
        self.strategy: Strategy = strategy
        """The strategy of Paceline's that does the same."""
        self._workers, self._default, self._device = workers, default, device
        self._is_of_one_host, self._hosts = is_of_one_host, tuple(hosts)
        self._resolver, self._deadline_s = resolver, deadline_s
        self._servers = None if takes_any_servers else strategy.traits.num_servers
        if not _is_launched():
            strategy.check(num_workers=self.num_workers)

    def __getattr__(self, name: str) -> Any:
        if name in _ELSEWHERE:
            raise AttributeError(f"{type(self).__name__} has no {name} here: {_ELSEWHERE[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def name(self) -> str:
        """The class's, for messages."""
        return type(self).__name__

    @property
    def num_workers(self) -> int:
        """How many processes train."""
        if self._workers is not None:
            return self._workers
        world = current()
        if world is not None:
            return world.context.size
        return int(os.environ["WORLD_SIZE"]) if _is_launched() else self._default

    @property
    def num_replicas_in_sync(self) -> int:
        """How many workers' gradients one update is the mean of: all, or 1 where each gradient is an update."""
        return self.num_workers if self.strategy.traits.is_synchronous else 1

    @property
    def command(self) -> str:
        """The command line that runs a script so; SCRIPT stands for its path."""
        options = "".join(f":{key}={value}" for key, value in settings_of(self.strategy).items())
        text = f"paceline run SCRIPT --strategy {name_of(self.strategy)}{options} --workers {self.num_workers}"
        return text if self._device == "auto" else f"{text} --device {self._device}"

    def global_batch(self, per_replica: int) -> int:
        """How many samples an update is of, where each replica takes `per_replica` of them.

        Raises:
            UsageError: it is not a count.
        """
        _require_count(per_replica, "per_replica")
        return per_replica * self.num_replicas_in_sync

    def per_replica_batch(self, global_batch: int) -> int:
        """The `batch_size` of a script's DataLoader, of which each worker takes so many, for updates of `global_batch`.

        Raises:
            UsageError: it is not a count, or the replicas cannot divide it evenly.
        """
        _require_count(global_batch, "global_batch")
        if global_batch % self.num_replicas_in_sync:
            raise UsageError(
                f"global_batch={global_batch} cannot be divided among {self.num_replicas_in_sync} replicas evenly"
            )
        return global_batch // self.num_replicas_in_sync

    @contextmanager
    def scope(self) -> Iterator[Worker]:
        """Joins this process to its run, as `paceline.init()` does, and gives its worker.

        Random generators are seeded when it is entered first, so that models built inside are the same on all
        workers; `worker.prepare` is what mirrors them. Leaving it ends nothing.

        Raises:
            UsageError: the run is not of this strategy, these workers, this device, or these hosts.
        """
        worker = paceline.init()
        self._require_same(worker)
        yield worker

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Result | None:
        """Train a function on every worker, in a scope.

        Called in a process that trains already, it calls the function there and returns None.

        Args:
            function: a train function, of one worker; what it returns is dropped.
            args, kwargs: what it is called with; they are pickled.
            settings: of `paceline.run`, such as `max_steps`, `checkpoint_every`, `out` and `resume`.

        Raises:
            UsageError: a setting is one that the strategy gives, or cannot be had; TF_CONFIG has another task start.
            RunFailed: see `paceline.run`.
        """
        if _is_launched():
            _in_scope(self, function, args, kwargs or {})
            return None
        program = partial(_in_scope, self, function, tuple(args), dict(kwargs or {}))
        program.__qualname__ = getattr(function, "__qualname__", repr(function))  # type: ignore[attr-defined]
        return self._launch(program, settings)

    def run_script(self, path: str | Path, arguments: Sequence[str] = (), **settings: Any) -> Result:
        """Train a script on every worker; `arguments` are its own, `settings` those of `paceline.run`.

        Raises:
            UsageError, RunFailed: as `run`; and this process trains already.
        """
        if _is_launched():
            raise UsageError(
                f"{self.name}.run_script starts workers, and this process is one already; import the script"
            )
        return self._launch(path, {"arguments": arguments, **settings})

    def _launch(self, program: Any, settings: Mapping[str, Any]) -> Result:
        try:
            self._require_startable(settings)
            waits: dict[str, Any] = {} if self._deadline_s is None else {"deadline_s": self._deadline_s}
            return paceline.run(
                program, strategy=self.strategy, workers=self.num_workers, device=self._device, **waits, **settings
            )
        except (PacelineError, KeyboardInterrupt) as error:
            show_alone(error)
            raise

    def _require_startable(self, settings: Mapping[str, Any]) -> None:
        """Raise UsageError where a run with these settings is not this strategy's, or not this task's, to start."""
        for name in _GIVEN_BY_NAME:
            if name in settings and (name != "deadline_s" or self._deadline_s is not None):
                raise UsageError(f"{name} is given by {self.name}, and cannot be a setting of its run")
        if self._resolver is not None:
            self._resolver.require_starts(who=self.name)
        if len(self._hosts) > 1 and settings.get("engine") != "virtual":
            from paceline.engines.ray.nodes import is_of_this_host_alone  # here, because it loads Ray

            if is_of_this_host_alone(settings.get("address")):
                self._require_hosts(self.num_workers)

    def _require_same(self, worker: Worker) -> None:
        world = current()
        assert world is not None  # init() has entered it
        num_workers, traits, own = worker.size, worker.strategy.traits, self.strategy.traits
        if worker.rank == 0:  # a plan is to know it
            said = {"by": self.name, "strategy": name_of(self.strategy), "servers": self._servers}
            said |= {"is_of_one_host": self._is_of_one_host}
            world.reporter.emit(EventRecord("demands", "run", 0, 0.0, said))
        agrees = traits.num_servers == own.num_servers and traits.exchanges_as(own)
        is_alone = num_workers == 1 and traits.exchanges_nothing
        if num_workers != self.num_workers or not (agrees or is_alone):
            raise UsageError(
                f"{self.name} is {name_of(self.strategy)} with {self.num_workers} worker(s) and {own.num_servers} "
                f"server(s), and this run is {name_of(worker.strategy)} with {num_workers} and {traits.num_servers}; "
                f"leave its numbers out for those of any run, or start it with {self.name}(...).run(...), or as "
                f"{self.command}"
            )
        if self._device not in ("auto", worker.device.type):
            raise UsageError(
                f"{self.name} is on {self._device}, and this worker computes on {worker.device.type}; run with "
                f"--device {self._device}"
            )
        is_on_one = world.context.local_size == num_workers
        if self._is_of_one_host and not is_on_one:
            raise UsageError(f"{self.name} is of one host, and this run's workers are on several")
        if is_on_one:
            self._require_hosts(num_workers)

    def _require_hosts(self, num_here: int) -> None:
        """Raise UsageError if so many workers, all on this host, are meant to be on several."""
        if len(self._hosts) < 2 or num_here < 2:
            return
        first, *others = self._hosts
        named = f"{first}, {', '.join(others[:_MOST_NAMED])}{', ...' if len(others) > _MOST_NAMED else ''}"
        raise UsageError(
            f"{self.name} is of {len(self._hosts)} hosts by TF_CONFIG ({named}), and all {num_here} workers would be "
            "on this one: no Ray cluster has the others. Start one over them (docs/cluster.md), and name it with "
            "address= or RAY_ADDRESS; or leave TF_CONFIG out, and give workers="
        )


def _in_scope(
    strategy: DistributionStrategy, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    with strategy.scope():
        function(*args, **kwargs)


def _is_launched() -> bool:
    """Whether this process trains already, or torchrun has started it to do so."""
    return current() is not None or "TORCHELASTIC_RUN_ID" in os.environ


def _require_count(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a number of samples, 1 or more, not {value!r}")
