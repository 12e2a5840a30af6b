"""`RayExecutor`: starts workers, calls functions on them, and ends them."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from paceline.horovod.elastic_jobs.driver import Policy
from paceline.horovod.elastic_jobs.known_hosts import Cooldown
from paceline.horovod.hosts import places
from paceline.horovod.ray.discovery import HostDiscovery
from paceline.horovod.ray.elastic_v2 import RayHostDiscovery
from paceline.horovod.ray.elastic_workers import ElasticWorkers
from paceline.horovod.ray.hearing import Callback, hearing
from paceline.horovod.ray.settings import has_no_effect
from paceline.horovod.ray.strategy import Placement

_LEAVE_WITHIN_S = 10.0
_PLACE = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK", "LOCAL_SIZE")


@dataclass
class MiniSettings:
    """How long things may take, in seconds."""

    timeout_s: float = 300
    """Time for workers to meet in `hvd.init()`."""
    placement_group_timeout_s: float = 100
    """Time until there is room on the cluster."""
    discovery: HostDiscovery | None = None
    """Finds an elastic job's hosts."""


class Coordinator:
    """Numbers workers among those of their host, and across hosts."""

    def __init__(self, settings: MiniSettings) -> None:
        self.settings = settings
        self.node_id_by_rank: dict[str, list[int]] = {}

    @property
    def world_size(self) -> int:
        return sum(map(len, self.node_id_by_rank.values()))

    @property
    def node_id_string(self) -> str:
        return ",".join(f"{node_id}:{len(ranks)}" for node_id, ranks in self.node_id_by_rank.items())

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        self.node_id_by_rank.setdefault(node_id, []).append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """Each rank's variables."""
        node_of = {rank: node for node, ranks in self.node_id_by_rank.items() for rank in ranks}
        ranks = sorted(node_of)
        found = zip(ranks, places([node_of[rank] for rank in ranks]), strict=True)
        return {rank: {f"HOROVOD_{name}": place[name] for name in _PLACE} for rank, place in found}


class Workers:
    """The actors of one executor, from `start` to `shutdown`."""

    def __init__(self, settings: MiniSettings, strategy: Placement) -> None:
        self.settings, self.strategy = settings, strategy
        self.actors: list[Any] = []

    def start(self, *, executable: tuple[Any, ...], extra_env_vars: Mapping[str, Any]) -> None:
        self.actors = self.strategy.create_workers()
        nodes = ray.get([actor.node_id.remote() for actor in self.actors])
        # Ranks go host by host, so that those of one host meet in its memory.
        placed = sorted(zip(nodes, self.actors, strict=True), key=lambda each: nodes.index(each[0]))
        self.actors = [actor for _, actor in placed]
        coordinator = Coordinator(self.settings)
        for rank, (node, _) in enumerate(placed):
            coordinator.register(node, node, rank)
        about = coordinator.finalize_registration()
        host, port = ray.get(self.actors[0].meeting_point.remote())
        gpus = self._gpus([node for node, _ in placed])
        ray.get(
            [
                actor.update_env_vars.remote(
                    {
                        **_as_torchrun(rank, len(placed), about[rank]),
                        **{"MASTER_ADDR": host, "MASTER_PORT": port, "HOROVOD_RANK": rank},
                        **{"HOROVOD_GLOO_TIMEOUT_SECONDS": self.settings.timeout_s},
                        **about[rank],
                        **gpus[rank],
                        **extra_env_vars,
                    }
                )
                for rank, actor in enumerate(self.actors)
            ]
        )
        ray.get([actor.start_executable.remote(*executable) for actor in self.actors])

    def call(self, function: Callable[[Any], Any], *, only_first: bool = False) -> list[Any]:
        """References to what it returns on each worker, by rank."""
        if not self.actors:
            raise ValueError("the executor has no workers: call start() first")
        return [actor.execute.remote(function) for actor in (self.actors[:1] if only_first else self.actors)]

    def results(self, function: Callable[[Any], Any], callbacks: "Sequence[Callback] | None") -> list[Any]:
        """What it returns on each worker, by rank; meanwhile each callback is called with all that workers log."""
        with hearing(callbacks) as queue:
            if queue is None:
                return list(ray.get(self.call(function)))
            ray.get([actor.set_queue.remote(queue) for actor in self.actors])
            try:
                return list(ray.get(self.call(function)))
            finally:
                with contextlib.suppress(Exception):  # a worker may be dead, which has been raised
                    ray.get([actor.set_queue.remote(None) for actor in self.actors])

    def shutdown(self) -> None:
        actors, self.actors = self.actors, []
        with contextlib.suppress(Exception):  # who does not leave in time is ended all the same
            ray.get([actor.leave.remote() for actor in actors], timeout=_LEAVE_WITHIN_S)
        for actor in actors:
            ray.kill(actor)
        self.strategy.shutdown()

    def _gpus(self, nodes: Sequence[str]) -> list[dict[str, str]]:
        """Each worker sees all GPUs of its host's workers, of which the script takes that of its local rank."""
        if not self.strategy.num_gpus:
            return [{} for _ in nodes]
        given = ray.get([actor.get_gpu_ids.remote() for actor in self.actors])
        on = {node: [gpu for other, gpus in zip(nodes, given, strict=True) if other == node for gpu in gpus]
              for node in nodes}  # fmt: skip
        return [{"CUDA_VISIBLE_DEVICES": ",".join(map(str, on[node]))} for node in nodes]


class RayExecutor:
    """Runs functions on workers that can `hvd.init()`, on the Ray cluster that the caller is connected to.

    Args:
        settings: of `create_settings`.
        num_workers: processes, which go where there is room.
        num_hosts, num_workers_per_host: instead of `num_workers`: as many processes on each of so many hosts.
        cpus_per_worker, gpus_per_worker: what Ray is to set aside for each.
        use_gpu: each has a GPU, or `gpus_per_worker`.
        use_current_placement_group: where the caller runs in a placement group, workers get its room.
        min_workers, max_workers: instead of `num_workers`: an elastic job, which grows and shrinks with the cluster.
        reset_limit: how often an elastic job may change its workers.
        cooldown_range: seconds, least and most, after which a host whose worker has failed gets another; none: never.
        elastic_timeout: seconds that room for `min_workers` is waited for.
        override_discovery: hosts are those of the cluster; otherwise `settings.discovery` finds them.

    Raises:
        ValueError: arguments contradict one another, or have no effect here.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: set[str] | None = None,
    ) -> MiniSettings:
        """How long workers may take to meet, and how long room may be waited for. Keys of ssh and network interfaces
        have no effect, as a warning says: Ray starts the workers, and has the addresses."""
        has_no_effect(ssh_identity_file=ssh_identity_file, ssh_str=ssh_str, nics=nics)
        return MiniSettings(timeout_s=timeout_s, placement_group_timeout_s=placement_group_timeout_s)

    def __init__(
        self,
        settings: MiniSettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if num_workers is not None and min_workers is not None:
            # The words that programs look for in the error of Horovod's.
            raise ValueError("Both `min_workers` and `num_workers` provided. A job is elastic, or has a fixed number")
        if min_workers is None and (reset_limit is not None or cooldown_range is not None):
            raise ValueError("reset_limit and cooldown_range need min_workers: they are for elastic jobs")
        if [num_workers, num_hosts, min_workers].count(None) != 2:
            raise ValueError("give one of num_workers, num_hosts and min_workers")
        if max_workers is not None and (min_workers is None or max_workers < min_workers):
            raise ValueError(f"max_workers={max_workers} needs a min_workers that is not larger")
        if gpus_per_worker is not None and (not use_gpu or gpus_per_worker < 1):
            raise ValueError(f"gpus_per_worker={gpus_per_worker} needs use_gpu=True, and to be at least 1")
        self.settings = settings
        self._num_workers, self._num_hosts, self._per_host = num_workers, num_hosts, num_workers_per_host
        self._policy = self._cooldown = None
        if min_workers is not None:
            self._policy = Policy(
                num_proc=min_workers,
                min_num_proc=min_workers,
                max_num_proc=max_workers,
                elastic_timeout_s=elastic_timeout,
                reset_limit=reset_limit,
            )
            self._cooldown = None if cooldown_range is None else Cooldown(*cooldown_range)
            if override_discovery:
                settings.discovery = RayHostDiscovery(use_gpu, cpus_per_worker, gpus_per_worker or 1)
            if settings.discovery is None:
                raise ValueError("set settings.discovery, or leave override_discovery as it is")
        self._num_cpus, self._num_gpus = cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0
        self._uses_current_group = use_current_placement_group

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers, each with an `executable_cls(*executable_args, **executable_kwargs)` of its own.

        Raises:
            TimeoutError: the cluster has no room for them.
        """
        self.adapter = self._adapter()
        try:
            self.adapter.start(
                executable=(executable_cls, executable_args, executable_kwargs), extra_env_vars=extra_env_vars or {}
            )
        except BaseException:
            self.adapter.shutdown()
            raise

    def execute(self, fn: Callable[[Any], Any], callbacks: "Sequence[Callback] | None" = None) -> list[Any]:
        """Call a function with each worker's object; the results by rank.

        Args:
            callbacks: each is called here with every value that a worker gives to `ray_logger.log`.
        """
        return self.adapter.results(fn, callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the object of rank 0's worker alone."""
        return ray.get(self.adapter.call(fn, only_first=True)[0])

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: "Sequence[Callback] | None" = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on each worker; the results by rank. Callbacks are as in `execute`."""
        return self.adapter.results(_called_with(fn, args, kwargs), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """As `run`, at once: what `ray.get` turns into the results."""
        return self.adapter.call(_called_with(fn, args, kwargs))

    def shutdown(self) -> None:
        """End the workers, whatever they do, and give their room back."""
        if hasattr(self, "adapter"):
            self.adapter.shutdown()

    def _adapter(self) -> Workers | ElasticWorkers:
        if self._policy is not None:
            assert self.settings.discovery is not None
            return ElasticWorkers(
                self.settings.discovery,
                policy=self._policy,
                cooldown=self._cooldown,
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                meet_within_s=self.settings.timeout_s,
            )
        assert self._num_workers is not None or self._num_hosts is not None
        strategy = Placement(
            num_workers=self._num_workers or (self._num_hosts or 0) * self._per_host,
            per_host=self._per_host if self._num_hosts is not None else 0,
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            timeout_s=self.settings.placement_group_timeout_s,
            uses_current_group=self._uses_current_group,
        )
        return Workers(self.settings, strategy)


def _called_with(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    given, named = tuple(args or ()), dict(kwargs or {})
    return lambda _: fn(*given, **named)


def _as_torchrun(rank: int, size: int, place: Mapping[str, int]) -> dict[str, Any]:
    """What torchrun would tell this process of its place, so that `hvd.init()` meets the others."""
    return {
        "TORCHELASTIC_RUN_ID": "horovod on ray",
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": place["HOROVOD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": place["HOROVOD_LOCAL_SIZE"],
    }
