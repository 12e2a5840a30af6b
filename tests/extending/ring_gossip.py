"""Every worker averages its parameters with the two beside it after each step (Lian et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from paceline.strategies import Entry
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer, option
from paceline.strategies.finite import may_step
from paceline.strategies.flat import flattened
from paceline.strategies.own_state import OwnState, load_replica, of_replica
from paceline.strategies.replica import Replica
from paceline.strategies.traits import Neighbouring, Traits
from paceline.topology import Ring


@final
@dataclass(frozen=True, kw_only=True)
class RingGossip(Strategy):
    every: int = option(1, "steps from one averaging to the next")

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=False, traffic=(Neighbouring(topology=Ring(), every=self.every),))

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return _RingGossip(self, context, replica)


@final
class _RingGossip(Synchronizer):
    def __init__(self, strategy: RingGossip, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._strategy = strategy
        self._flats = flattened(replica)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        nonfinite, rank = self._strategy.nonfinite, self.context.rank
        applies = may_step(self.replica, nonfinite, rank=rank, step=self.iteration + 1)
        if applies:
            update()
        self.iteration += 1
        if self.iteration % self._strategy.every == 0:
            for flat in self._flats:
                self._mix(flat)
        return StepOutcome(self.iteration, staleness=0 if applies else -1)

    def _mix(self, flat: Tensor) -> None:
        collective = self.context.collective
        near = Ring().neighbours(self.iteration, self.context.rank, self.context.size)
        received = {source: torch.empty_like(flat) for source in near.receives_from}
        works = [collective.recv(tensor, source=source) for source, tensor in received.items()]
        works += [collective.send(flat, destination=rank) for rank in near.sends_to]
        for work in works:
            work.wait()
        flat.mul_(near.own_weight)
        for source, weight in near.receives_from.items():
            flat.add_(received[source], alpha=weight)

    def global_model(self) -> AbstractContextManager[nn.Module]:
        return self.averaged_model()

    def own_state(self) -> dict[str, OwnState]:
        return of_replica(self.replica)

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        load_replica(self.replica, own)


ENTRY = Entry(name="ring-gossip", strategy=RingGossip, summary="parameters averaged with the ring's neighbours")
