"""What one worker's run is made of, and how far it is."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.records import EventRecord, Reporter
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.replica import Replica
from paceline.strategies.traits import Traits
from paceline.training.accounting import Account
from paceline.training.clock import TrainingClock
from paceline.training.feeds import EachHandouts, Feed
from paceline.training.handouts import Handouts
from paceline.training.running_statistics import RunningStatistics
from paceline.training.same_gradients import SameGradients


@final
@dataclass(frozen=True)
class Prepared:
    """What the script gave to `prepare`, joined to the strategy."""

    replica: Replica
    """All models and parameters in one, with the first optimizer."""
    optimizers: Mapping[str, torch.optim.Optimizer]
    optimizer_names: list[str]
    """As a checkpoint keeps them."""
    synchronizer: Synchronizer
    feeds: Mapping[str, Feed]
    handouts: Handouts | EachHandouts
    account: Account
    same_gradients: SameGradients | None
    """Looks at each rank's own, under strategies in lock-step."""
    extra: dict[str, Any]
    """What else a checkpoint holds, by name."""
    statistics: RunningStatistics | None = None
    """Of the global model's own, under strategies that make it of models that have trained apart."""

    @property
    def feed(self) -> Feed:
        """Of a run with one loader."""
        (feed,) = self.feeds.values()
        return feed

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """As the synchronizer's."""
        with self.synchronizer.global_model() as model:
            if self.statistics is None:
                yield model
                return
            with self.statistics.of_mean(self.synchronizer.context.collective):
                yield model


@final
@dataclass
class WorkerRun:
    """The worker's place in the world, what it is asked to do, and its counters."""

    context: Context
    strategy: Strategy
    config: RunConfig
    reporter: Reporter
    clock: TrainingClock = field(init=False)
    traits: Traits = field(init=False)
    """The strategy's, which makes them anew whenever it is asked, as they are in this run."""
    iteration: int = 0
    """Global iterations, in the strategy's unit."""
    steps: int = 0
    samples: int = 0
    has_ended: bool = False
    """Nothing that the script does from here on is training."""
    is_evaluating: bool = False
    """The script's evaluation runs, on this rank alone."""
    goes_on_by: str = ""
    """How a script goes on that has checkpoints of its own, so that the run writes none; empty for others."""
    awaits_others: bool = False
    """It waits in a pause, or at its end, for workers that have steps to go until there."""
    prepared: Prepared = field(init=False, repr=False, compare=False)
    """What `prepare` was given, an attribute as it is asked for several times a step."""

    def __post_init__(self) -> None:
        self.clock = TrainingClock(time_s=self.context.pacing.now_s)
        traits = self.strategy.traits
        self.traits = traits if self.config.elastic is None else traits.when_elastic

    def __getattr__(self, name: str) -> NoReturn:
        """Raises UsageError for `prepared` if the script has not called `prepare`, and AttributeError for all else."""
        if name == "prepared":
            raise UsageError("call worker.prepare(model, optimizer, loader) first")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def epoch(self) -> int:
        """The epoch of the first loader's data."""
        return next(iter(self.prepared.feeds.values())).loader.place.epoch if self.is_prepared else 0

    @property
    def is_prepared(self) -> bool:
        return "prepared" in vars(self)

    def wants_stop(self) -> bool:
        """Whether this worker wants all to stop: the time is over, or the user asked for it."""
        is_over = self.config.max_time_s is not None and self.clock.now_s >= self.config.max_time_s
        return is_over or self.reporter.stop_requested()

    @property
    def stop_vote(self) -> Callable[[], bool]:
        """What tells the same in every step, with as few calls as the run allows."""
        return self.reporter.stop_requested if self.config.max_time_s is None else self.wants_stop

    def tell(self, event: str, details: Mapping[str, Any] | None = None, *, at_s: float | None = None) -> None:
        """Record an event of the whole run, from rank 0, at a time of the training clock."""
        if self.context.is_first:
            time_s = self.clock.now_s if at_s is None else at_s
            self.reporter.emit(EventRecord(event, "run", self.iteration, time_s, dict(details or {})))
