"""As `elastic`, in the words of `RayExecutor`."""

from typing import final

from paceline.horovod.ray.discovery import slots_of_hosts


@final
class RayHostDiscovery:
    """Slots of the hosts of the Ray cluster, all of whose resources are taken to be free.

    Args:
        cpus_per_worker, gpus_per_worker: what a worker takes; GPUs count if `use_gpu`.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_worker: int = 1, gpus_per_worker: int = 1) -> None:
        self.use_gpu, self.cpus_per_worker, self.gpus_per_worker = use_gpu, cpus_per_worker, gpus_per_worker

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots by a host's address, for hosts that have any."""
        return slots_of_hosts(num_cpus=self.cpus_per_worker, num_gpus=self.gpus_per_worker if self.use_gpu else 0)
