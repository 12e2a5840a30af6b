"""Aggregators that look at each coordinate alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.aggregate.base import Aggregator, Contribution
from paceline.division import divide


@final
@dataclass(frozen=True)
class WeightedMean(Aggregator, name="mean"):
    """The sum of weight times tensor, over the sum of weights."""

    streams: ClassVar[bool] = True

    def aggregate(
        self, contributions: Sequence[Contribution], out: Sequence[Tensor], *, gram: Tensor | None = None
    ) -> Sequence[Tensor]:
        if len(contributions) == 1:
            return contributions[0].gradients
        weights = [each.weight if each.kind == "gradient" else -each.weight for each in contributions]
        is_plain = all(weight == 1.0 for weight in weights)
        for index, mean in enumerate(out):
            first, *others = [each.tensors[index] for each in contributions]
            if is_plain:
                torch.add(first.to(mean.dtype), others[0], out=mean)
                for tensor in others[1:]:
                    mean.add_(tensor)
                divide(mean, len(contributions))
            else:
                torch.mul(first.to(mean.dtype), weights[0], out=mean)
                for tensor, weight in zip(others, weights[1:], strict=True):
                    mean.add_(tensor, alpha=weight)
                mean.div_(sum(each.weight for each in contributions))
        return out


MEAN = WeightedMean()
"""What is done unless a strategy says otherwise."""


@final
@dataclass(frozen=True)
class MajorityVote(Aggregator):
    """Each coordinate's sign in most contributions, 1 or -1; 0 where as many have the one as the other.

    Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018, algorithm 3.
    """

    def aggregate(
        self, contributions: Sequence[Contribution], out: Sequence[Tensor], *, gram: Tensor | None = None
    ) -> Sequence[Tensor]:
        for result, stacked in _stacks(contributions, out):
            result.copy_(stacked.sign().sum(dim=0).sign())
        return out


@final
@dataclass(frozen=True)
class Median(Aggregator, name="median"):
    """Takes each coordinate's median; of an even number, the mean of the two in the middle (Yin et al., ICML 2018)."""

    def aggregate(
        self, contributions: Sequence[Contribution], out: Sequence[Tensor], *, gram: Tensor | None = None
    ) -> Sequence[Tensor]:
        for result, stacked in _stacks(contributions, out):
            result.copy_(_median(stacked.sort(dim=0).values))
        return out


@final
@dataclass(frozen=True)
class TrimmedMean(Aggregator, name="trimmed-mean"):
    """The mean of each coordinate without its `byzantine` largest and smallest values (Yin et al., ICML 2018)."""

    byzantine: int

    def require(self, num_contributions: int) -> None:
        require_byzantine(self.byzantine, num_contributions, least=2 * self.byzantine + 1)

    def aggregate(
        self, contributions: Sequence[Contribution], out: Sequence[Tensor], *, gram: Tensor | None = None
    ) -> Sequence[Tensor]:
        self.require(len(contributions))
        for result, stacked in _stacks(contributions, out):
            ordered = stacked.sort(dim=0).values
            result.copy_(ordered[self.byzantine : len(contributions) - self.byzantine].mean(dim=0))
        return out


@final
@dataclass(frozen=True)
class AroundMedian(Aggregator):
    """The mean of each coordinate's values that are nearest to its median, all but `left_out` of them."""

    left_out: int

    def aggregate(
        self, contributions: Sequence[Contribution], out: Sequence[Tensor], *, gram: Tensor | None = None
    ) -> Sequence[Tensor]:
        for result, stacked in _stacks(contributions, out):
            ordered = stacked.sort(dim=0).values
            nearest = (ordered - _median(ordered)).abs().sort(dim=0, stable=True).indices
            result.copy_(ordered.gather(0, nearest[: len(contributions) - self.left_out]).mean(dim=0))
        return out


def require_byzantine(byzantine: int, num_contributions: int, *, least: int) -> None:
    """Raises ValueError where so many hostile contributions are too many."""
    if byzantine < 0:
        raise ValueError(f"byzantine must be at least 0, not {byzantine}")
    if num_contributions < least:
        raise ValueError(f"byzantine={byzantine} needs {least} contributions, and there are {num_contributions}")


def _stacks(contributions: Sequence[Contribution], out: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a result and what it is made of, one contribution a row."""
    columns = zip(*(each.gradients for each in contributions), strict=True)
    return [
        (result, torch.stack([tensor.to(result.dtype) for tensor in column]))
        for result, column in zip(out, columns, strict=True)
    ]


def _median(ordered: Tensor) -> Tensor:
    low, high = (len(ordered) - 1) // 2, len(ordered) // 2
    return (ordered[low] + ordered[high]) / 2
