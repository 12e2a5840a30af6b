"""How the contributions to one update are joined: coordinate by coordinate, or by how they lie to each other."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from paceline.division import divide

ContributionKind = Literal["gradient", "delta"]


class Contribution(NamedTuple):
    """What one sender gives to one update."""

    sender: int
    weight: float
    kind: ContributionKind
    """A delta is `local - global`: its negative is joined as a gradient."""
    tensors: Sequence[Tensor]

    @property
    def gradients(self) -> Sequence[Tensor]:
        """The tensors, with the sign that an optimizer descends along."""
        return self.tensors if self.kind == "gradient" else [-tensor for tensor in self.tensors]


class Aggregator(ABC):
    """Joins contributions of the same shapes, at least one, in the order in which they are given."""

    is_coordinate_wise: ClassVar[bool] = True
    """An element of the result depends on the same element of the contributions alone, so that ranges are joined each
    for itself."""
    streams: ClassVar[bool] = False
    """The joint of some contributions, with the sum of their weights, stands for them: it may be an update of its own,
    or be joined with others."""

    @abstractmethod
    def aggregate(self, contributions: Sequence[Contribution], out: Sequence[Tensor]) -> Sequence[Tensor]:
        """One gradient.

        Args:
            out: of the contributions' shapes, in the dtype to sum in; the result may be written there. Where the
                aggregator streams, these may be the first contribution's own tensors.
        """

    @final
    def fold(self, total: Contribution, contribution: Contribution) -> Contribution:
        """Both as one, in the memory of `total`, whose dtype is the one to sum in. The aggregator must stream."""
        tensors = self.aggregate([total, contribution], total.tensors)
        return Contribution(total.sender, total.weight + contribution.weight, "gradient", tensors)


@final
@dataclass(frozen=True)
class WeightedMean(Aggregator):
    """The sum of weight times tensor, over the sum of weights."""

    streams: ClassVar[bool] = True

    def aggregate(self, contributions: Sequence[Contribution], out: Sequence[Tensor]) -> Sequence[Tensor]:
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
"""What servers do unless a strategy says otherwise."""


@final
@dataclass(frozen=True)
class Median(Aggregator):
    """Takes each coordinate's median; of an even number, the mean of the two in the middle (Yin et al., ICML 2018)."""

    def aggregate(self, contributions: Sequence[Contribution], out: Sequence[Tensor]) -> Sequence[Tensor]:
        for mean, *tensors in zip(out, *(each.gradients for each in contributions), strict=True):
            ordered = torch.stack([tensor.to(mean.dtype) for tensor in tensors]).sort(dim=0).values
            low, high = (len(tensors) - 1) // 2, len(tensors) // 2
            torch.add(ordered[low], ordered[high], out=mean).div_(2)
        return out


class ByGram(Aggregator):
    """Mixes contributions by weights that follow from their inner products, and joins the mixtures by `then`."""

    is_coordinate_wise: ClassVar[bool] = False
    then: Aggregator

    @abstractmethod
    def weights(self, gram: Tensor) -> Tensor:
        """The weight of each contribution in each mixture, shape (mixtures, n).

        Args:
            gram: inner products of the whole contributions, float64 of shape (n, n).
        """

    @final
    def aggregate(self, contributions: Sequence[Contribution], out: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = self.weights(gram(contributions)).tolist()
        return self.then.aggregate([_mixture(contributions, row, out) for row in rows], out)


@final
@dataclass(frozen=True)
class Krum(ByGram):
    """The contribution that is nearest to its n - f - 2 nearest others, of n with f hostile ones; or the `num_chosen`
    nearest (Blanchard et al., NeurIPS 2017)."""

    num_hostile: int
    num_chosen: int = 1
    then: Aggregator = MEAN

    def weights(self, gram: Tensor) -> Tensor:
        n = len(gram)
        num_neighbours = n - self.num_hostile - 2
        if num_neighbours < 1 or not 1 <= self.num_chosen <= n:
            raise ValueError(f"Krum cannot choose {self.num_chosen} of {n} with {self.num_hostile} hostile ones")
        squares = gram.diagonal()
        distances = (squares[:, None] + squares[None, :] - 2 * gram).nan_to_num(nan=torch.inf, posinf=torch.inf)
        distances.fill_diagonal_(torch.inf)
        scores = distances.sort(dim=1).values[:, :num_neighbours].sum(dim=1)
        chosen = scores.argsort(stable=True)[: self.num_chosen].sort().values
        return torch.eye(n, dtype=gram.dtype)[chosen]


def gram(contributions: Sequence[Contribution]) -> Tensor:
    """Inner products of each two contributions, float64 of shape (n, n); those of ranges add up to the whole's."""
    flat = [torch.cat([tensor.reshape(-1).double() for tensor in each.gradients]) for each in contributions]
    stacked = torch.stack(flat)
    return stacked @ stacked.T


def _mixture(contributions: Sequence[Contribution], row: Sequence[float], out: Sequence[Tensor]) -> Contribution:
    """Those of weight 0 are left out, so that nothing of them comes in, were they infinite."""
    used = [(weight, each) for weight, each in zip(row, contributions, strict=True) if weight]
    if len(used) == 1 and used[0][0] == 1.0:
        return used[0][1]
    sums = [torch.zeros_like(like) for like in out]
    for weight, each in used:
        for total, tensor in zip(sums, each.gradients, strict=True):
            total.add_(tensor, alpha=weight)
    return Contribution(-1, sum(weight * each.weight for weight, each in used), "gradient", sums)
