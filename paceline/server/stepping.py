"""How a shard's optimizer steps: with the hyperparameters that the LR schedulers of the gradient's workers have set."""

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.server.closing import Groups
from paceline.server.optimizer import IMPLEMENTATION, step_of


@final
class Stepping:
    """A part of `Shard`.

    Args:
        parameters: of the shard, updated in place.
        optimizer: over those tensors.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer, self._step = parameters, optimizer, step_of(optimizer)
        self._initial: Groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self.in_force: Groups = self._initial
        """What the last step was made with."""
        self.known: dict[int, tuple[int, Groups]] = {}
        """By worker, what it has set last, and from which of its clocks on."""

    @property
    def num_groups(self) -> int:
        return len(self._initial)

    def is_alike_for(self, workers: Iterable[int]) -> bool:
        """Whether each of them would step with what is in force."""
        unset = (0, self._initial)
        return all(self.known.get(worker, unset)[1] == self.in_force for worker in workers)

    def set_at(self, clocks: Mapping[int, int]) -> dict[int, Groups]:
        """What these workers have set at just these clocks."""
        latest = {worker: self.known[worker] for worker in clocks if worker in self.known}
        return {worker: new for worker, (clock, new) in latest.items() if clock == clocks[worker]}

    def step(self, workers: Sequence[int], gradients: Sequence[Tensor], *, keeps: bool) -> None:
        """One step of the optimizer, with what the gradient's own worker set; of several, with what was set last.

        Args:
            keeps: what is in force stays so if none of these workers has set anything, rather than what it was at the
                start.
        """
        known = [self.known[worker] for worker in workers if worker in self.known]
        unset = self.in_force if keeps else self._initial
        self.use(max(known, key=lambda entry: entry[0])[1] if known else unset)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._step()

    def use(self, groups: Groups) -> None:
        """Have these in force."""
        if groups is not self.in_force:
            for own, new in zip(self._optimizer.param_groups, groups, strict=True):
                own.update({name: value for name, value in new.items() if name not in IMPLEMENTATION})
            self.in_force = groups
