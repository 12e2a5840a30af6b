"""How a tensor that lies at the same place in every rank's memory is divided among the ranks of a host."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.comm.arguments import pieces

CACHE_LINE_BYTES = 64
# 128 KiB of float32, which stays in the L2 cache between its reduction and its copies. Twice that is 10 % faster for
# 45 MB, but from 32768 elements on torch starts its own threads, if it may, on cores on which the other ranks run.
_BLOCK_ELEMENTS = 32768


def shares_of(tensor: Tensor, size: int) -> list[slice]:
    """The share of each of `size` ranks; shares begin on cache lines if the 1-D tensor does, and may be empty."""
    line = max(1, CACHE_LINE_BYTES // tensor.itemsize)
    length = -(-tensor.numel() // (size * line)) * line
    return [slice(*bounds) for bounds in pairwise(min(rank * length, tensor.numel()) for rank in range(size + 1))]


def blocks_of(parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """1-D tensors of one length, cut into blocks that fit a core's cache: of each block, every tensor's."""
    num_elements = _BLOCK_ELEMENTS if torch.get_num_threads() > 1 else 2 * _BLOCK_ELEMENTS
    blocks = zip(*(pieces(part, num_elements) for part in parts), strict=True)
    return [block for block in blocks if block[0].numel()]
