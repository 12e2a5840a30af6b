"""Elastic jobs on Ray in the words of Horovod's older executor, and which hosts there are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from paceline.horovod.elastic_jobs.driver import Policy
from paceline.horovod.elastic_jobs.known_hosts import Cooldown
from paceline.horovod.ray.discovery import HostDiscovery, slots_of_hosts
from paceline.horovod.ray.elastic_workers import ElasticWorkers
from paceline.horovod.ray.settings import has_no_effect


@final
class RayHostDiscovery:
    """Slots of the hosts of the Ray cluster, all of whose resources are taken to be free.

    Args:
        cpus_per_slot, gpus_per_slot: what a worker takes; GPUs count if `use_gpu`.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu, self.cpus_per_slot, self.gpus_per_slot = use_gpu, cpus_per_slot, gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots by a host's address, for hosts that have any."""
        return slots_of_hosts(num_cpus=self.cpus_per_slot, num_gpus=self.gpus_per_slot if self.use_gpu else 0)


@dataclass
class ElasticSettings:
    """What an elastic job may do; times in seconds."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None
    elastic_timeout: float = 600
    timeout_s: float = 30
    """Time for workers to meet."""
    discovery: HostDiscovery | None = None


@final
class ElasticRayExecutor:
    """Runs a function whose training is `hvd.elastic.run`, on the hosts of the Ray cluster that there are at a time.

    Args:
        settings: of `create_settings`.
        cpus_per_slot, gpus_per_slot: what Ray is to set aside for a worker; GPUs need `use_gpu`.
        env_vars: variables of every worker.
        override_discovery: hosts are those of the cluster; otherwise `settings.discovery` finds them.

    Raises:
        ValueError: arguments contradict one another.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: set[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        *,
        cooldown_range: tuple[float, float] | None = None,
    ) -> ElasticSettings:
        """`min_np` and `max_np` are older names of the first two. Keys of ssh and network interfaces have no effect, as
        a warning says: Ray starts the workers, and has the addresses."""
        has_no_effect(ssh_identity_file=ssh_identity_file, nics=nics)
        return ElasticSettings(
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            cooldown_range=cooldown_range,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot is not None and (not use_gpu or gpus_per_slot < 1):
            raise ValueError(f"gpus_per_slot={gpus_per_slot} needs use_gpu=True, and to be at least 1")
        if override_discovery:
            settings.discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot or 1)
        self.settings, self.env_vars = settings, env_vars or {}
        self._num_cpus, self._num_gpus = cpus_per_slot, (gpus_per_slot or 1) if use_gpu else 0
        self.driver: ElasticWorkers | None = None

    def start(self) -> None:
        """Make ready for `run`. Raises ValueError if nobody finds hosts."""
        settings = self.settings
        if settings.discovery is None:
            raise ValueError("set settings.discovery, or leave override_discovery as it is")
        cooldown = settings.cooldown_range
        self.driver = ElasticWorkers(
            settings.discovery,
            policy=Policy(
                num_proc=settings.min_num_proc,
                min_num_proc=settings.min_num_proc,
                max_num_proc=settings.max_num_proc,
                elastic_timeout_s=settings.elastic_timeout,
                reset_limit=settings.reset_limit,
            ),
            cooldown=None if cooldown is None else Cooldown(*cooldown),
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            meet_within_s=settings.timeout_s,
        )
        self.driver.start(executable=(None, None, None), extra_env_vars=self.env_vars)

    def run(self, worker_fn: Callable[[], Any], callbacks: "Sequence[Callable[[Any], Any]] | None" = None) -> list[Any]:
        """Call the function on every worker; what those return that do so, by rank.

        Args:
            callbacks: each is called here with every value that a worker gives to `ray_logger.log`.

        Raises:
            RunFailed: nobody can go on; the message says why.
            ValueError: there was no `start`.
        """
        if self.driver is None:
            raise ValueError("the executor has no workers: call start() first")
        return self.driver.results(lambda _: worker_fn(), callbacks)
