"""Rounds of workers that come and go under servers, where all of them have a part in each.

A round is a clock: each worker that is there pushes the mean gradient of its part. Where a global batch is kept, an
update takes as many rounds as it needs: what a worker that dies had is in a later one of the same update, so that this
is in the end made of the samples that it would have been made of anyway. Otherwise each round is an update.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from paceline.server.admission import ProtocolError


class Share(NamedTuple):
    """What a push has of the samples of its update."""

    num_samples: int
    """0: the push has nothing for the update, of which others have all that is left. If there is a gradient, it is of a
    sample that is another's, and stands in where the aggregator needs one."""
    of: int
    """That the whole update is made of; 0: of as many as the round brings."""
    epoch: int
    """Of the data. With the number below it tells this update from others."""
    global_batch: int

    @classmethod
    def of_plain(cls, plain: object) -> Self:
        """Raises ProtocolError if this is nothing that a worker says."""
        if not isinstance(plain, list | tuple) or len(plain) != 4 or not all(type(each) is int for each in plain):
            raise ProtocolError(f"a worker pushed {plain!r} as its share of an update")
        share = cls(*plain)
        if share.num_samples < 0 or share.of < 0 or 0 < share.of < share.num_samples:
            raise ProtocolError(f"a worker pushed {share.num_samples} samples of an update of {share.of}")
        return share


class Round(NamedTuple):
    """A clock that is over, of an update that may take several."""

    clock: int
    share: Share
    """Of all who took part."""
    is_void: bool
    """A gradient of it was none. Then so is the update."""

    @classmethod
    def of_plain(cls, plain: Sequence[int]) -> Self:
        """What `plain` was given for."""
        clock, is_void, *share = plain
        return cls(clock, Share(*share), bool(is_void))

    @property
    def plain(self) -> list[int]:
        """For a message."""
        return [self.clock, int(self.is_void), *self.share]


class Took(NamedTuple):
    """Whose pushes rounds were made of."""

    clock: int
    """From this one on, until others are named."""
    workers: tuple[int, ...]


@final
class WholeUpdate:
    """The update that is open on a shard: the sum of its rounds, each of which counts by its samples."""

    def __init__(self) -> None:
        self.took: list[Took] = []
        """Since the start."""
        self._share: Share | None = None  # of the update that is open, if a push has come
        self._num_samples = 0
        self._is_void = False
        self._sums: list[Tensor] = []

    @property
    def is_open(self) -> bool:
        """Whether some of its rounds are over, and it is not."""
        return self._num_samples > 0 or self._is_void

    def require(self, share: Share) -> None:
        """Raises ProtocolError for a push that is of another update than those before it, or has too many samples."""
        if self._share is None:
            self._share = share
        if share[1:] != self._share[1:] or 0 < share.of < self._num_samples + share.num_samples:
            raise ProtocolError(
                f"a worker pushed for {_in_words(share)}, and others for {_in_words(self._share)}, of which "
                f"{self._num_samples} samples are there"
            )

    def end_round(self, one: Round, workers: Sequence[int], mean: Sequence[Tensor] | None) -> bool:
        """These took part in it. Returns whether the update is complete.

        Args:
            mean: of the gradients, or what else they are joined to, if samples count in it; not kept, unless it is all
                of the update's.
        """
        if not self.took or self.took[-1].workers != tuple(workers):
            self.took.append(Took(one.clock, tuple(workers)))
        self._share, self._is_void = one.share, self._is_void or one.is_void
        num_samples, of = one.share.num_samples, one.share.of or one.share.num_samples
        self._num_samples += num_samples
        if mean is not None and num_samples == of:
            self._sums = list(mean)  # as it is, so that a run in which nobody dies has the same bits
        elif mean is not None:
            self._sums = self._sums or [_wide_zeros(each) for each in mean]
            for total, each in zip(self._sums, mean, strict=True):
                total.add_(each, alpha=num_samples / of)
        return self._num_samples == of

    def take(self) -> list[Tensor] | None:
        """The joint gradient of the whole global batch, which is complete; none if that is void, or nobody is left who
        has a part of it. Another one begins."""
        gradients = None if self._is_void else self._sums or None
        self._share, self._num_samples, self._is_void, self._sums = None, 0, False, []
        return gradients


def _wide_zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _in_words(share: Share) -> str:
    return f"global batch {share.global_batch} of epoch {share.epoch}, of {share.of} samples"
