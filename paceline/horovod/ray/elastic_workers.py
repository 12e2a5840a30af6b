"""What an executor of elastic jobs on Ray has between its start and its end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

from paceline.horovod.elastic_jobs.driver import Policy
from paceline.horovod.elastic_jobs.known_hosts import Cooldown
from paceline.horovod.elastic_jobs.loop import LOOK_EVERY_S, Loop
from paceline.horovod.ray.actors import ActorFleet, Making
from paceline.horovod.ray.discovery import HostDiscovery, asking
from paceline.horovod.ray.hearing import Callback, hearing


class SlotInfo(NamedTuple):
    """One place for a worker; without a host's name there is none."""

    hostname: str
    local_rank: int
    worker: int = 0


@final
class ElasticWorkers:
    """Workers start with each call, on the hosts of that time.

    Args:
        num_cpus, num_gpus: what Ray is to set aside for a worker.
        meet_within_s: how long workers may take to meet.
    """

    def __init__(
        self,
        discovery: HostDiscovery,
        *,
        policy: Policy,
        cooldown: Cooldown | None,
        num_cpus: float,
        num_gpus: int,
        meet_within_s: float,
    ) -> None:
        self._discovery, self._policy, self._cooldown = discovery, policy, cooldown
        self._num_cpus, self._num_gpus, self._meet_within_s = num_cpus, num_gpus, meet_within_s
        self._making: Making | None = None
        self._fleet: ActorFleet | None = None

    def start(self, *, executable: tuple[Any, ...], extra_env_vars: Mapping[str, Any]) -> None:
        variables = {"HOROVOD_GLOO_TIMEOUT_SECONDS": self._meet_within_s, **extra_env_vars}
        self._making = Making(self._num_cpus, self._num_gpus, executable, variables)

    def results(self, function: Callable[[Any], Any], callbacks: "Sequence[Callback] | None") -> list[Any]:
        """What it returns on each worker that ends, by rank. Raises RunFailed if nobody can go on."""
        if self._making is None:
            raise ValueError("the executor has no workers: call start() first")
        with hearing(callbacks) as queue:
            self._fleet = fleet = ActorFleet(self._making, function, queue)
            fleet.loop = Loop(
                fleet, asking(self._discovery), policy=self._policy, cooldown=self._cooldown, look_every_s=LOOK_EVERY_S
            )
            try:
                fleet.loop.run()
            finally:
                fleet.close()
        return [fleet.results[worker] for worker in fleet.loop.ranks if worker in fleet.results]

    def call(self, function: Callable[[Any], Any], *, only_first: bool = False) -> list[Any]:
        raise NotImplementedError("an elastic job's workers come and go, so that nobody waits for all of them: use run")

    def shutdown(self) -> None:
        """There are no workers but during a call."""
        self._making = None

    def get_slot_info(self, hostname: str, local_rank: int) -> SlotInfo:
        """A host's place for a worker of this number, if there is one."""
        fleet = self._fleet
        there = [] if fleet is None else [each for each, host in fleet.hosts.items() if host == hostname]
        return SlotInfo(hostname, local_rank, there[local_rank]) if local_rank < len(there) else SlotInfo("", -1)

    def get_worker_client(self, slot_info: SlotInfo) -> Any:
        """The place's worker, once it has met the others."""
        fleet = self._fleet
        return None if fleet is None or slot_info.worker not in fleet.loop.ranks else fleet.actors.get(slot_info.worker)
