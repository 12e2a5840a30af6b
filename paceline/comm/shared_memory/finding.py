"""Where a mean of several ranks' tensors is not finite, seen as it is reduced."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.base import NonFinite


def seems_finite(values: Any) -> bool:
    """Whether the sum of a tensor or an array is finite: false if an element is not, or if the sum overflows."""
    return math.isfinite(float(values.sum()))


def moved(found: NonFinite | None, *, by: int) -> NonFinite | None:
    """The same of a larger tensor, in which this one begins at that element."""
    return found and NonFinite(found.element + by, found.rank)


def find(parts: Sequence[Tensor], mean: Tensor) -> NonFinite | None:
    """The first element of the mean that is not finite, and the first rank whose part is not there.

    Where the first rank's part is overwritten, or all are finite and their sum is not, it is the first rank.
    """
    places = torch.nonzero(~mean.isfinite())
    if not len(places):
        return None
    element = int(places[0])
    ranks = (rank for rank, part in enumerate(parts) if rank and not bool(part[element].isfinite()))
    return NonFinite(element, next(ranks, 0))
