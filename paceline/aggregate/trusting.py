"""Aggregators that decide by directions whom to trust."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.aggregate.base import ByGram
from paceline.aggregate.coordinates import MEAN

_ALMOST_ONE = 0.99


@final
@dataclass(frozen=True)
class FLTrust(ByGram, name="fl-trust"):
    """The data of the worker `trusted` are known to be clean. Others' contributions count by how far their direction is
    that of its own, and are made as long as it; its own does not count (Cao et al., NDSS 2021, equations 2 to 4)."""

    knows_senders: ClassVar[bool] = True
    trusted: int = 0
    then = MEAN

    def require(self, num_contributions: int) -> None:
        if num_contributions < 2:
            raise ValueError("fl-trust compares others with the trusted worker, and there are none")

    def require_senders(self, senders: Sequence[int]) -> None:
        super().require_senders(senders)
        if self.trusted not in senders:
            raise ValueError(f"trusted={self.trusted} has sent nothing; those who have are {sorted(senders)}")

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        root = senders.index(self.trusted)
        trust = _cosines(gram)[root].clamp(min=0)
        trust[root] = 0
        norms = gram.diagonal().sqrt()
        lengths = (norms[root] / norms).nan_to_num(posinf=0.0)
        return (trust / trust.sum().clamp(min=torch.finfo(gram.dtype).tiny) * lengths)[None]


@final
@dataclass(frozen=True)
class FoolsGold(ByGram, name="fools-gold"):
    """Senders whose sums of contributions point the same way count less (Fung et al., RAID 2020, algorithm 1).

    There the update is the weighted sum; here it is the weighted mean, so that a learning rate means what it means
    without a defence."""

    remembers: ClassVar[bool] = True
    knows_senders: ClassVar[bool] = True
    then = MEAN

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        alike = _cosines(gram).fill_diagonal_(0)
        most = alike.max(dim=1).values
        pardoned = alike.where(most[:, None] >= most[None, :], alike * (most[:, None] / most[None, :]))
        trust = (1 - pardoned.max(dim=1).values).clamp(0, 1).where(gram.diagonal().isfinite(), 0.0)
        trust = (trust / trust.max()).nan_to_num(0.0).clamp(max=_ALMOST_ONE)
        weights = (trust.logit() + 0.5).clamp(0, 1)
        return (weights / weights.sum().clamp(min=torch.finfo(gram.dtype).tiny))[None]


def _cosines(gram: Tensor) -> Tensor:
    """The cosine of the angle between each two contributions; 0 with one that is zero or infinite."""
    norms = gram.diagonal().sqrt()
    cosines = gram.where(gram.isfinite(), 0.0) / (norms[:, None] * norms[None, :])
    return cosines.nan_to_num(0.0, posinf=0.0, neginf=0.0)
