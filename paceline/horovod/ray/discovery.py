"""Slots of the hosts of the Ray cluster, all of whose resources are taken to be free."""

from collections.abc import Callable
from typing import Any, Protocol

import ray

from paceline.errors import RunFailed


class HostDiscovery(Protocol):
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots by a host's address, for hosts that have any."""


def slots_of_hosts(*, num_cpus: float, num_gpus: float) -> dict[str, int]:
    """By a host's address, for hosts that have any.

    Args:
        num_cpus, num_gpus: what a worker takes.
    """
    found: dict[str, int] = {}
    for node in ray.nodes():
        resources: dict[str, float] = node["Resources"]
        slots = resources.get("CPU", 0) // num_cpus
        if num_gpus:
            slots = min(slots, resources.get("GPU", 0) // num_gpus)
        if node.get("Alive", node.get("alive")) and slots >= 1:
            found[node["NodeManagerAddress"]] = found.get(node["NodeManagerAddress"], 0) + int(slots)
    return found


def asking(discovery: Any) -> Callable[[], dict[str, int]]:
    """What an elastic job takes of a user's own discovery; whose errors it survives once it runs."""

    def discover() -> dict[str, int]:
        try:
            found: dict[str, int] = discovery.find_available_hosts_and_slots()
        except Exception as error:
            raise RunFailed(f"{type(discovery).__name__}: {error!r}") from error
        return found

    return discover
