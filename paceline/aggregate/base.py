"""What an aggregator is: it makes one gradient of what several senders contribute."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from paceline.errors import RunFailed
from paceline.pieces import Piece

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


class Aggregator(Piece, ABC):
    """Joins contributions of the same shapes, at least one, in the order in which they are given.

    Only those that stream look at weights: to others, a weight is one more thing that a hostile sender may choose.
    """

    is_coordinate_wise: ClassVar[bool] = True
    """An element of the result depends on the same element of the contributions alone, so that ranges are joined each
    for itself. Others need the Gram matrix of whole contributions, which is the sum of the ranges' ones."""
    streams: ClassVar[bool] = False
    """The joint of some contributions, with the sum of their weights, stands for them: it may be an update of its own,
    or be joined with others."""
    remembers: ClassVar[bool] = False
    """The Gram matrix that it is given is of the sums of all that each sender has contributed so far."""
    knows_senders: ClassVar[bool] = False
    """It treats senders by who they are, so that it joins no mixtures of what several have sent."""

    @abstractmethod
    def aggregate(
        self, contributions: Sequence[Contribution], out: Sequence[Tensor], *, gram: Tensor | None = None
    ) -> Sequence[Tensor]:
        """One gradient. The contributions stay as they are, unless the aggregator streams.

        Args:
            out: of the contributions' shapes, in the dtype to sum in; the result may be written there. Where the
                aggregator streams, these may be the first contribution's own tensors.
            gram: the contributions' Gram matrix, where they are a range of longer ones; none: they are whole.

        Raises:
            ValueError: as `require_senders`.
        """

    def require(self, num_contributions: int) -> None:
        """Raises ValueError, which says how many it takes, if it cannot join so many contributions."""

    def require_senders(self, senders: Sequence[int]) -> None:
        """Raises ValueError, which says what it needs, if it cannot join contributions of these senders."""
        self.require(len(senders))

    @final
    def fold(self, total: Contribution, contribution: Contribution) -> Contribution:
        """Both as one, in the memory of `total`, whose dtype is the one to sum in. The aggregator must stream."""
        tensors = self.aggregate([total, contribution], total.tensors)
        return Contribution(total.sender, total.weight + contribution.weight, "gradient", tensors)


class ByGram(Aggregator):
    """Mixes contributions by weights that follow from their inner products, and joins the mixtures by `then`."""

    is_coordinate_wise: ClassVar[bool] = False
    then: Aggregator

    def __post_init__(self) -> None:
        """Raises ValueError for a `then` that joins no mixtures."""
        if self.then.knows_senders:
            raise ValueError(f"then={self.then} looks at who has sent what, and would be given mixtures; leave one out")

    @abstractmethod
    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        """The weight of each contribution in each mixture, float64 of shape (mixtures, n).

        Args:
            gram: inner products of the whole contributions, float64 of shape (n, n). One that is not finite has an
                infinite square, and is orthogonal to all others.
        """

    @final
    def aggregate(
        self, contributions: Sequence[Contribution], out: Sequence[Tensor], *, gram: Tensor | None = None
    ) -> Sequence[Tensor]:
        self.require_senders([each.sender for each in contributions])
        products = _with_infinite_apart(gram_of(contributions) if gram is None else gram)
        rows = self.weights(products, [each.sender for each in contributions])
        mixtures = [_mixture(contributions, row, out) for row in rows.tolist()]
        return self.then.aggregate(mixtures, out, gram=_mixed(products, rows))


def counted(aggregator: Aggregator, contributions: Sequence[Contribution]) -> Sequence[Contribution]:
    """Those that the aggregator is given: the ones that have a weight. Others come of no samples that count, as from a
    worker that has just joined. Where the aggregator cannot do with those alone, as when fewer samples are left than
    there are workers, it is given all.

    >>> from paceline.aggregate import Krum, Median
    >>> three = [Contribution(sender, weight, "gradient", []) for sender, weight in enumerate([1.0, 0.5, 0.0])]
    >>> [each.sender for each in counted(Median(), three)]
    [0, 1]
    >>> [each.sender for each in counted(Krum(byzantine=0), three)]
    [0, 1, 2]
    """
    with_weight = [each for each in contributions if each.weight > 0]
    return with_weight if with_weight and can_join(aggregator, with_weight) else contributions


def can_join(aggregator: Aggregator, contributions: Sequence[Contribution]) -> bool:
    """Whether there are as many contributions as it takes, and those of whom it needs one."""
    try:
        aggregator.require_senders([each.sender for each in contributions])
    except ValueError:
        return False
    return True


def require_joined(aggregator: Aggregator, given: Sequence[Contribution]) -> None:
    """Raises RunFailed, which says who has contributed, where the aggregator cannot join that."""
    senders = [each.sender for each in given]
    try:
        aggregator.require_senders(senders)
    except ValueError as error:
        raise RunFailed(
            f"aggregate={aggregator}: {error}; workers {', '.join(map(str, senders))} have contributed to this update. "
            "Start the run again, with --resume and more workers"
        ) from None


def join(aggregator: Aggregator, contributions: Sequence[Contribution], out: Sequence[Tensor]) -> Sequence[Tensor]:
    """The joint of those that count, as `Aggregator.aggregate`. Raises RunFailed as `require_joined`."""
    given = counted(aggregator, contributions)
    require_joined(aggregator, given)
    return aggregator.aggregate(given, out)


def gram_of(contributions: Sequence[Contribution]) -> Tensor:
    """Inner products of each two contributions, float64 of shape (n, n); those of ranges add up to the whole's."""
    flat = [torch.cat([tensor.reshape(-1).double() for tensor in each.gradients]) for each in contributions]
    stacked = torch.stack(flat)
    return (stacked @ stacked.T).cpu()


def squared_distances(gram: Tensor) -> Tensor:
    """The squared distance between each two contributions, shape (n, n), symmetric to the last bit; 0 on the
    diagonal."""
    squares = gram.diagonal()
    distances = (squares[:, None] + squares[None, :] - (gram + gram.T)).clamp(min=0)
    return distances.fill_diagonal_(0)


def distances_from(gram: Tensor, weights: Tensor) -> Tensor:
    """The distance from the mixture with these weights, shape (n,), to each contribution. An infinite one has weight
    0."""
    inner = gram.where(gram.isfinite(), 0.0) @ weights
    return (weights @ inner - 2 * inner + gram.diagonal()).clamp(min=0).sqrt()


def _with_infinite_apart(gram: Tensor) -> Tensor:
    is_lost = ~gram.diagonal().isfinite()
    if not is_lost.any():
        return gram
    kept = gram.where(~(is_lost[:, None] | is_lost[None, :]), 0.0)
    kept.diagonal()[is_lost] = torch.inf
    return kept


def _mixture(contributions: Sequence[Contribution], row: Sequence[float], out: Sequence[Tensor]) -> Contribution:
    """Those of weight 0 are left out, so that nothing of them comes in, were they infinite."""
    used = [(weight, each) for weight, each in zip(row, contributions, strict=True) if weight]
    if len(used) == 1 and used[0][0] == 1.0:
        return used[0][1]._replace(weight=1.0)
    sums = [torch.zeros_like(like) for like in out]
    for weight, each in used:
        for total, tensor in zip(sums, each.gradients, strict=True):
            total.add_(tensor, alpha=weight)
    return Contribution(-1, 1.0, "gradient", sums)


def _mixed(gram: Tensor, rows: Tensor) -> Tensor:
    """The mixtures' Gram matrix. One that takes of an infinite contribution is infinite."""
    is_lost = gram.diagonal().isinf()
    mixed = rows @ gram.where(gram.isfinite(), 0.0) @ rows.T
    lost = (rows[:, is_lost] != 0).any(dim=1)
    mixed.diagonal()[lost] = torch.inf
    return mixed
