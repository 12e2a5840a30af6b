"""What a prediction or a simulation is asked: what moves under a strategy, among which workers and servers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from paceline.cluster.description import Cluster
from paceline.errors import UsageError
from paceline.planner import turns
from paceline.planner.demand import StepWork
from paceline.planner.setting import Setting
from paceline.strategies import build, name_of
from paceline.strategies.base import Strategy
from paceline.strategies.traits import AllReduced, ClientTurns, Served, Traffic, Traits

_INSTEAD = {False: "run it on the virtual engine", True: "measure it with `paceline run`"}


@final
@dataclass(frozen=True)
class Question:
    name: str
    traits: Traits
    traffic: Traffic | None
    """None: nothing moves."""
    setting: Setting

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        *,
        strategy: str | Strategy,
        workers: int,
        work: StepWork,
        options: Mapping[str, Any] | None,
    ) -> "Question":
        """Raises UsageError if the strategy does not exist or has no price, the cluster has no room, or a step's time
        is unknown."""
        chosen = build(strategy, options) if isinstance(strategy, str) else strategy
        if workers < 1:
            raise UsageError(f"workers must be at least 1, not {workers}")
        chosen.check(num_workers=workers)
        name, traits = name_of(chosen), chosen.traits
        if (reason := why_unpriced(traits, work)) is not None:
            raise UsageError(f"strategy {name} {reason}, so no plan can price it; {_INSTEAD[traits.is_for_ray_alone]}")
        traffic = traits.traffic[0] if traits.traffic else None
        setting = Setting.of(cluster, as_moved(work, traffic), num_workers=workers, num_servers=traits.num_servers)
        return cls(name, traits, traffic, setting)


def moves_rows(traffic: Traffic | None) -> bool:
    """Whether of weights of `nn.Embedding(sparse=True)` rows move, and not the whole."""
    return isinstance(traffic, AllReduced | Served) and traffic.moves_rows


def as_moved(work: StepWork, traffic: Traffic | None) -> StepWork:
    """The weights that it has are those of which rows move, and nothing else does; all others move whole."""
    if moves_rows(traffic):
        return work.by_rows(on_servers=isinstance(traffic, Served))
    return replace(work, weights=())


def why_unpriced(traits: Traits, work: StepWork) -> str | None:
    """What keeps a plan from saying what a strategy takes; none: nothing does."""
    if traits.by_script:
        return "leaves to the script what moves"
    if work.demand is not None and not work.demand.allows(traits):
        return f"the script's {work.demand.by} refuses: it is {work.demand.strategy}"
    if traits.num_replicas:
        return "has copies of what servers hold (replicas), whose traffic is not modelled"
    if work.rows is not None and not traits.holds_rows:
        return "has no place for the rows of a ShardedEmbedding"
    if work.rows is None and traits.serves_rows_alone:
        return "has servers for rows of a ShardedEmbedding alone, of which the model has none"
    if traits.traffic is None:
        return traits.untold or "does not say what it moves"
    if len(traits.traffic) > 1:
        return "moves several things in one step"
    return next((turns.why_unpriced(each, work) for each in traits.traffic if isinstance(each, ClientTurns)), None)
