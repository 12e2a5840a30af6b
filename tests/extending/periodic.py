"""Local steps; every so many, an outer step with momentum takes the mean of what they changed (DiLoCo, 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.buckets import Bucket
from paceline.correction import Proximal, correct
from paceline.errors import UsageError
from paceline.schedule import Every
from paceline.server.state import export_state, import_state
from paceline.strategies import Entry
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer, option
from paceline.strategies.exchange import Exchange
from paceline.strategies.finite import may_step
from paceline.strategies.flat import flattened
from paceline.strategies.own_state import OwnState, load_replica, of_replica
from paceline.strategies.replica import Replica
from paceline.strategies.traits import AllReduced, Traits


@final
@dataclass(frozen=True, kw_only=True)
class Periodic(Strategy):
    every: int = option(4, "local steps of a round")
    outer_lr: float = option(0.7, "learning rate of the outer step")
    mu: float = option(0.0, "weight of the proximal term that draws workers back to where the round began")
    outer_momentum: float = option(0.9, "its Nesterov momentum; 0: none")

    def validate(self) -> None:
        if self.every < 1:
            raise UsageError(f"every must be at least 1, not {self.every}")

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=False, unit="round", traffic=(AllReduced(every=self.every),))

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return _Periodic(self, context, replica)


@final
class _Periodic(Synchronizer):
    def __init__(self, strategy: Periodic, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._strategy, self._schedule = strategy, Every(strategy.every)
        self._flats = flattened(replica)
        self._outer = [torch.nn.Parameter(flat.clone()) for flat in self._flats]
        momentum = strategy.outer_momentum
        self._optimizer = torch.optim.SGD(self._outer, lr=strategy.outer_lr, momentum=momentum, nesterov=momentum > 0)
        for outer in self._outer:
            outer.grad = torch.zeros_like(outer)
        none = torch.zeros(0)
        buckets = [Bucket(outer.grad, outer.grad, none) for outer in self._outer if outer.grad is not None]
        self._exchange = Exchange(context.collective, buckets)
        self._steps = 0
        self._begin_round()

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        nonfinite, rank = self._strategy.nonfinite, self.context.rank
        applies = may_step(self.replica, nonfinite, rank=rank, step=self._steps + 1)
        if applies:
            correct(Proximal(self._strategy.mu), self.replica.parameters, self._anchors)
            update()
        self._steps += 1
        if self._schedule.due(self._steps):
            self._end_round()
        return StepOutcome(self.iteration, staleness=0 if applies else -1)

    def _end_round(self) -> None:
        for outer, flat in zip(self._outer, self._flats, strict=True):
            torch.sub(outer.data, flat, out=outer.grad)
        for work in [self._exchange.start(index) for index in range(len(self._outer))]:
            work.wait()
        self._optimizer.step()
        self._steps = 0
        self.iteration += 1
        self._begin_round()

    def _begin_round(self) -> None:
        for outer, flat in zip(self._outer, self._flats, strict=True):
            flat.copy_(outer.data)
        self._anchors = [parameter.detach().clone() for parameter in self.replica.parameters]

    def leave(self) -> None:
        if self._steps:  # the data ended in a round: on every worker, as all have as many batches
            self._end_round()

    def own_state(self) -> dict[str, OwnState]:
        outer = export_state(self._optimizer, self._outer)
        states = {f"outer.{name}": OwnState(tensor, "average") for name, tensor in outer.items()}
        return {**of_replica(self.replica), **states}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        load_replica(self.replica, own)
        for outer, flat in zip(self._outer, self._flats, strict=True):
            outer.data.copy_(flat)
        prefix = "outer."
        saved = {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}
        import_state(self._optimizer, self._outer, saved)


ENTRY = Entry(name="periodic", strategy=Periodic, summary="local steps, and an outer step with momentum each round")
