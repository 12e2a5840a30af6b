"""Which of the cluster's hosts get workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.horovod.ray.worker import BaseHorovodWorker


def create_placement_group(
    resources_per_bundle: Mapping[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[PlacementGroup, list[dict[str, float]]]:
    """Room for so many bundles, as ("PACK") close together or ("STRICT_SPREAD") a host each.

    Raises:
        TimeoutError: there was none within `pg_timeout` seconds.
    """
    bundles = [{name: count for name, count in resources_per_bundle.items() if count} for _ in range(num_bundles)]
    group: PlacementGroup = ray.util.placement_group(bundles, strategy=pg_strategy)
    ready, _ = ray.wait([group.ready()], timeout=pg_timeout)
    if not ready:
        ray.util.remove_placement_group(group)
        raise TimeoutError(
            f"no room within {pg_timeout:g} s for {num_bundles} times {bundles[0]}, placed {pg_strategy}; the cluster "
            f"has {ray.available_resources()} to spare. Ask for fewer workers, or raise placement_group_timeout_s"
        )
    return group, bundles


@dataclass
class Placement:
    """Makes the workers, and gives their room back.

    Args:
        num_workers: of all hosts.
        per_host: workers of one host, where as many go to each; 0: they go where there is room, close together.
        uses_current_group: those that the caller itself runs in have the room, if it runs in one.
    """

    num_workers: int
    per_host: int
    num_cpus: float
    num_gpus: float
    timeout_s: float
    uses_current_group: bool
    group: PlacementGroup | None = None
    _created_placement_group: bool = field(default=False, init=False)

    def create_workers(self) -> list[Any]:
        """Actors that are under way. Raises TimeoutError if there is no room."""
        self.group = get_current_placement_group() if self.uses_current_group else None
        per_bundle = 0
        if self.group is None:
            per_bundle = self.per_host or 1
            self.group, _ = create_placement_group(
                {"CPU": self.num_cpus * per_bundle, "GPU": self.num_gpus * per_bundle},
                self.num_workers // per_bundle,
                self.timeout_s,
                "STRICT_SPREAD" if self.per_host else "PACK",
            )
            self._created_placement_group = True
        actor = ray.remote(BaseHorovodWorker)
        return [
            actor.options(
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self.group,
                    placement_group_bundle_index=number // per_bundle if per_bundle else -1,
                    placement_group_capture_child_tasks=False,
                ),
            ).remote(world_rank=number, world_size=self.num_workers)
            for number in range(self.num_workers)
        ]

    def shutdown(self) -> None:
        if self._created_placement_group and self.group is not None:
            ray.util.remove_placement_group(self.group)
        self.group = None
