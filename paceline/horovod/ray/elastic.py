"""Which hosts there are, and how many workers each has room for."""

from typing import final

import ray


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
        found: dict[str, int] = {}
        for node in ray.nodes():
            resources = node["Resources"]
            slots = resources.get("CPU", 0) // self.cpus_per_slot
            if self.use_gpu:
                slots = min(slots, resources.get("GPU", 0) // self.gpus_per_slot)
            if node["Alive"] and slots >= 1:
                found[node["NodeManagerAddress"]] = found.get(node["NodeManagerAddress"], 0) + int(slots)
        return found
