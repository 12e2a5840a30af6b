"""Momentum from how the mixed model moved, which neighbours share, rather than from each worker's own gradients.

Lin et al., "Quasi-global momentum: accelerating decentralized deep learning on heterogeneous data", ICML 2021,
algorithm 1 without Nesterov's variant, with the same factor for both of its moving averages.
"""

from collections.abc import Mapping
from typing import final

from torch import Tensor
from torch.optim import SGD

from paceline.errors import UsageError
from paceline.strategies.gossip.model import FlatModel


def moved_on(momentum: Tensor, before: Tensor, after: Tensor, *, lr: float, factor: float) -> Tensor:
    """The momentum after a step from `before` to `after`, in place: an average of what SGD's gradients would be."""
    return momentum.mul_(factor).add_(before - after, alpha=(1 - factor) / lr)


@final
class QuasiGlobal:
    """Raises UsageError for another optimizer than SGD without a momentum of its own."""

    def __init__(self, model: FlatModel, factor: float) -> None:
        optimizer = model.replica.optimizer
        if not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups):
            raise UsageError("quasi_global takes the place of the momentum of SGD: use SGD with momentum=0")
        self._model, self._factor = model, factor
        self._momentum, self._before = model.parcel.alike(), model.parcel.alike()
        self._by_parameter = model.parcel.layout.views(self._momentum.buffer)

    def begin(self) -> None:
        """Before a step: add the momentum to the gradients."""
        self._before.buffer.copy_(self._model.parcel.buffer)
        for parameter, momentum in zip(self._model.replica.parameters, self._by_parameter, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(momentum, alpha=self._factor)

    def end(self) -> None:
        """After a step, and its exchange if it has one."""
        groups, segments = self._model.replica.optimizer.param_groups, self._model.parcel.layout.segments
        moved = zip(segments, self._momentum.values, self._before.values, self._model.parcel.values, strict=True)
        for segment, momentum, before, after in moved:
            if lr := float(groups[segment.group]["lr"]):
                moved_on(momentum, before, after, lr=lr, factor=self._factor)

    def state(self) -> dict[str, Tensor]:
        return {"quasi_global": self._momentum.buffer}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, if it is there."""
        if (saved := state.get("quasi_global")) is not None:
            self._momentum.buffer.copy_(saved)
