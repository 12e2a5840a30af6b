"""Means of integers over all workers, which no sum on the way may overflow."""

import torch
from torch import Tensor

from paceline.comm.base import Collective
from paceline.comm.reduction import require_reducible


def average_integers(collective: Collective, tensor: Tensor) -> None:
    """Put the mean over all ranks, truncated towards zero, in place of an integer tensor. Collective call.

    With n ranks each value is n times a quotient and a remainder. The sum of the quotients is within what one rank may
    have, that of the remainders within the square of n.

    Raises:
        TypeError: of a dtype that has no mean, such as uint64.
    """
    require_reducible("mean", tensor.dtype)
    size = collective.size
    own = tensor.long()
    quotients = own.div(size, rounding_mode="floor")
    sums = torch.stack((quotients, own - quotients * size))
    collective.all_reduce(sums, op="sum").wait()
    whole, left = sums
    mean = whole + left.div(size, rounding_mode="floor")
    truncates_up = (mean < 0) & (left % size != 0)
    tensor.copy_(mean + truncates_up)


def has_integer_mean(tensor: Tensor) -> bool:
    """Whether `average_integers` is for it: all integers that torch computes with."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != torch.bool
