"""Gives workers and servers their hosts of a cluster."""

from dataclasses import dataclass
from functools import lru_cache

from paceline.cluster.description import Cluster
from paceline.errors import UsageError


@dataclass(frozen=True)
class Places:
    """Hosts by their numbers."""

    workers: tuple[int, ...]
    """The host of each rank; ranks run host by host."""
    servers: tuple[int, ...]

    @property
    def ranks_by_host(self) -> list[list[int]]:
        """The ranks of each host that has some, in the order of its first."""
        ranks: dict[int, list[int]] = {}
        for rank, host in enumerate(self.workers):
            ranks.setdefault(host, []).append(rank)
        return list(ranks.values())


def place(cluster: Cluster, *, num_workers: int, num_servers: int) -> Places:
    """Workers on the first hosts that take some; servers where the cluster says. Raises UsageError without room."""
    slots = _slots_of(cluster)
    if num_workers > len(slots):
        raise UsageError(
            f"the cluster has room for {len(slots)} worker(s), not {num_workers}; "
            "raise count or workers in its [[hosts]], or start fewer"
        )
    workers = slots[:num_workers]
    if cluster.servers.placement == "with workers":
        homes = list(dict.fromkeys(workers))
        return Places(workers, tuple(homes[index % len(homes)] for index in range(num_servers)))
    hosts = cluster.each_host()
    taken = set(workers)
    free = [number for number in range(len(hosts)) if number not in taken]
    free.sort(key=lambda number: hosts[number].slots > 0)  # those for servers only come first
    if num_servers > len(free):
        raise UsageError(
            f"{num_servers} server(s) need hosts of their own, and {num_workers} worker(s) leave {len(free)} of "
            f'{len(hosts)}; add hosts, or say placement = "with workers" in [servers]'
        )
    return Places(workers, tuple(free[:num_servers]))


@lru_cache(maxsize=4)
def _slots_of(cluster: Cluster) -> tuple[int, ...]:
    """The host of each worker that there is room for. Plans ask again and again."""
    return tuple(number for number, host in enumerate(cluster.each_host()) for _ in range(host.slots))
