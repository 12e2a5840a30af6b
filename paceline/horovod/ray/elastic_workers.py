"""What an executor of elastic jobs on Ray has between its start and its end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from paceline.horovod.elastic_jobs.driver import Policy
from paceline.horovod.elastic_jobs.known_hosts import Cooldown
from paceline.horovod.elastic_jobs.loop import LOOK_EVERY_S, Loop
from paceline.horovod.ray.actors import ActorFleet, Making
from paceline.horovod.ray.discovery import HostDiscovery, asking
from paceline.horovod.ray.hearing import Callback, hearing
from paceline.running.launched import LaunchedRun
from paceline.strategies.horovod import Horovod

_PROGRAM = "an elastic executor's function"
"""Records call the program so."""


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
        come_within_s = max(policy.come_within_s, 2 * meet_within_s)
        self._policy = replace(policy, come_within_s=come_within_s)
        self._discovery, self._cooldown = discovery, cooldown
        self._num_cpus, self._num_gpus, self._meet_within_s = num_cpus, num_gpus, meet_within_s
        self._making: Making | None = None
        self._fleet: ActorFleet | None = None

    def start(self, *, executable: tuple[Any, ...], extra_env_vars: Mapping[str, Any]) -> None:
        variables = {"HOROVOD_GLOO_TIMEOUT_SECONDS": self._meet_within_s, **extra_env_vars}
        self._making = Making(self._num_cpus, self._num_gpus, executable, variables)

    def results(self, function: Callable[[Any], Any], callbacks: "Sequence[Callback] | None") -> list[Any]:
        """Returns what the function returns on each worker that ends, by rank. Raises RunFailed if nobody can go on.

        Steps are recorded in a new directory under `runs/`, which is not made where there are none.
        """
        if self._making is None:
            raise ValueError("the executor has no workers: call start() first")
        recorded = LaunchedRun(_PROGRAM, [], strategy=Horovod(), num_workers=self._policy.num_proc)
        with recorded, hearing(callbacks) as queue:
            self._fleet = fleet = ActorFleet(self._making, function, queue, recorded)
            ask = asking(self._discovery)

            def discover() -> dict[str, int]:
                fleet.slots = found = ask()
                return found

            fleet.loop = Loop(fleet, discover, policy=self._policy, cooldown=self._cooldown, look_every_s=LOOK_EVERY_S)
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
        there = [] if fleet is None else [each for each, host in fleet.hosts.copy().items() if host == hostname]
        return SlotInfo(hostname, local_rank, there[local_rank]) if local_rank < len(there) else SlotInfo("", -1)

    def get_worker_client(self, slot_info: SlotInfo) -> Any:
        """The place's worker, once it has met the others."""
        fleet = self._fleet
        return None if fleet is None or slot_info.worker not in fleet.loop.ranks else fleet.actors.get(slot_info.worker)
