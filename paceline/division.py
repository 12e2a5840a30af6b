"""Dividing a sum by the number of its terms."""

import functools

import torch
from torch import Tensor


def divide(total: Tensor, divisor: int) -> None:
    """`total` becomes total / divisor, truncated towards zero where it holds integers."""
    if total.is_floating_point() or total.is_complex():
        # By a tensor: right after a training step, whose code is in no cache, a number takes 20 us more. By a power of
        # two the product with the reciprocal is the quotient to the last bit, and comes sooner.
        if divisor & (divisor - 1) == 0 and not total.is_complex():
            total.mul_(_scalar(1 / divisor, total.dtype, total.device))
        else:
            total.div_(_scalar(divisor, total.dtype, total.device))
    else:
        total.div_(divisor, rounding_mode="trunc")


@functools.cache
def _scalar(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    wide = torch.float32 if dtype.itemsize < 4 else dtype  # half precision cannot hold every number of ranks
    return torch.tensor(number, dtype=wide, device=device)
