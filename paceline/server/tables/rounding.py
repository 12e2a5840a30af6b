"""Rows in half precision, whose updates are made in float32: how what comes of them is rounded."""

import torch
from torch import Tensor

from paceline.server.tables.hashing import mixed, words

_LEFT_OUT = {torch.bfloat16: 16, torch.float16: 13}  # bits of a float32


def rounded(rows: Tensor, dtype: torch.dtype, keys: Tensor, *, seed: int, number: int) -> Tensor:
    """Round each element up or down by chance, so that the mean is the row's (Gupta et al., "Deep learning with limited
    numerical precision", ICML 2015, section 3.1). Rounded to the nearest, updates below half of a last bit would be
    lost for good. The chance follows from key, seed and the update's number alone.

    Args:
        rows: float32 of shape (keys, dim).
    """
    (num, dim), unit = rows.shape, 1 << _LEFT_OUT[dtype]
    width = -(-dim // 4)
    seed = int(mixed(torch.tensor([seed ^ number])))
    chance = words(keys, seed=seed, num=width).flatten().view(torch.int16).view(num, 4 * width)[:, :dim]
    bits = rows.view(torch.int32) + (chance.int() & (unit - 1))
    return (bits & -unit).view(torch.float32).to(dtype)
