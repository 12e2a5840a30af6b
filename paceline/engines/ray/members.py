"""A run's processes, and what became of them."""

import functools
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from paceline.engines.ray.nodes import Place
from paceline.engines.ray.world_spec import ServerInfo, WorkerInfo
from paceline.engines.scripting import Outcome


@dataclass
class Members:
    """The run's actors by name, and what became of them."""

    actors: dict[str, Any] = field(default_factory=dict)
    infos: dict[str, WorkerInfo | ServerInfo] = field(default_factory=dict)
    pending: dict[Any, str] = field(default_factory=dict)
    """What they were asked to do and have not ended."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    @property
    def servers(self) -> dict[str, Any]:
        return {name: actor for name, actor in self.actors.items() if name.startswith("server")}

    @property
    def has_workers_pending(self) -> bool:
        """Whether a worker is still at it."""
        return any(name.startswith("worker") and name not in self.dead for name in self.pending.values())

    @property
    def has_error(self) -> bool:
        return any(outcome.error is not None for outcome in self.outcomes.values())

    @property
    def has_failure(self) -> bool:
        return bool(self.dead) or self.has_error

    @property
    def has_cause(self) -> bool:
        """Whether a failure is known that is not merely a consequence of another."""
        outcomes = self.outcomes.values()
        return bool(self.dead) or any(outcome.error and not outcome.is_consequence for outcome in outcomes)

    def forget(self, name: str) -> Any:
        """It is no member any more. Returns its actor."""
        self.dead.discard(name)
        self.outcomes.pop(name, None)
        self.pending = {future: other for future, other in self.pending.items() if other != name}
        return self.actors.pop(name)


def actor_of(kind: type, where: Place, **options: Any) -> Any:
    """What starts an actor of this class there."""
    affinity: Any = NodeAffinitySchedulingStrategy(where.node.node_id, soft=False)
    if where.bundle is not None:
        group: Any = ray.util.get_current_placement_group()
        affinity = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=where.bundle)
    return _actor_class(kind).options(
        num_cpus=where.num_cpus,
        num_gpus=where.num_gpus,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=affinity,
        **options,
    )


@functools.cache
def _actor_class(kind: type) -> Any:
    """Made once a process, since Ray keeps every class that it makes."""
    return cast(Any, ray.remote)(kind)


def last_line(error: BaseException) -> str:
    """What an error of Ray's comes to."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
