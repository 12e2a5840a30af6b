"""Where a run's processes go: over the cluster's hosts, or into the placement group that the launcher itself is in."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup

from paceline.engines.ray.job import Job
from paceline.engines.ray.nodes import Node, Place, answering, nodes, own_node_id, place
from paceline.errors import UsageError


def places_of(job: Job, say: Callable[[str], None]) -> tuple[bool, list[Place], list[Place]]:
    """Whether workers train on GPUs, where they go, and where servers go. Ranks run host by host.

    A launcher inside a placement group, such as a trial of Ray Tune, has no more of the cluster than that: each process
    goes into a bundle of its own, and its cores are the bundle's.

    Args:
        say: hears which hosts are left out.

    Raises:
        UsageError: no host has the resources at all, or the group has too few bundles.
    """
    hosts, num_servers, device = nodes(), job.strategy.traits.num_servers, job.config.device
    group = ray.util.get_current_placement_group()
    if group is not None:
        found = _bundles(group, hosts)
        uses_cuda = _uses_cuda(device, sum(where.num_gpus for where in found))
        return uses_cuda, *place_in_bundles(
            found, num_workers=job.num_workers, num_servers=num_servers, wants_gpus=uses_cuda, own=own_node_id()
        )
    hosts = answering(hosts, say)
    uses_cuda = _uses_cuda(device, sum(host.num_gpus for host in hosts))
    return uses_cuda, *place(
        hosts, num_workers=job.num_workers, num_servers=num_servers, wants_gpus=uses_cuda, is_spread=job.is_spread
    )


def place_in_bundles(
    bundles: list[Place], *, num_workers: int, num_servers: int, wants_gpus: bool, own: str
) -> tuple[list[Place], list[Place]]:
    """Workers and servers into the group's last bundles, since the first may be the launcher's own.

    Args:
        own: the launcher's node, whose workers come first.

    Raises:
        UsageError: there are too few, or too few with a GPU where workers want one.
    """
    number = num_workers + num_servers
    if len(bundles) < number:
        raise UsageError(
            f"the placement group that this process is in has {len(bundles)} bundles, and the run has {number} "
            f"processes: {num_workers} workers and {num_servers} servers; ask for a bundle for each"
        )
    last = bundles[len(bundles) - number :]
    last.sort(key=lambda where: (wants_gpus and not where.num_gpus, where.node.node_id != own, where.node.node_id))
    workers, servers = last[:num_workers], last[num_workers:]
    if wants_gpus and not all(where.num_gpus for where in workers):
        raise UsageError(
            "fewer bundles of the placement group have a GPU than there are workers; use --device cpu, or ask "
            "for a bundle with a GPU for each worker"
        )
    cores: defaultdict[str, float] = defaultdict(float)
    for where in workers:
        cores[where.node.node_id] += where.num_cpus
    return [replace(where, host_cores=max(1, int(cores[where.node.node_id]))) for where in workers], servers


def _bundles(group: PlacementGroup, hosts: list[Node]) -> list[Place]:
    """The group's, in their order, each as the place of one process."""
    by_id = {host.node_id: host for host in hosts}
    where: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [
        Place(by_id[where[index]], resources.get("CPU", 0.0), resources.get("GPU", 0.0), bundle=index)
        for index, resources in enumerate(group.bundle_specs)
    ]


def _uses_cuda(device: str, num_gpus: float) -> bool:
    if device == "cuda" and num_gpus == 0:
        raise UsageError("--device cuda: no node of the cluster has a GPU; use --device cpu")
    return device != "cpu" and num_gpus > 0
