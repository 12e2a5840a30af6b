"""Blocks of several processes in one range of addresses, so that one tensor has them all."""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.shared_memory.block import BlockAddress, open_block
from paceline.comm.shared_memory.mapping import address_range, map_into


def side_by_side(
    addresses: Sequence[BlockAddress], *, unit_bytes: int, is_written: bool = False
) -> tuple[Tensor, list[int]]:
    """A uint8 tensor over all these blocks, and the unit at which each of them begins; units between blocks are 0.

    Args:
        unit_bytes: blocks begin at a multiple of it.
        is_written: blocks are written; else a write into one would kill the process.

    Raises:
        PeerLost: as `open_block`.
        OSError: this process may have no more memory.
    """
    step = unit_bytes * mmap.PAGESIZE  # so that blocks of as many units of other sizes begin at the same ones
    starts, num_bytes = [], 0
    for address in addresses:
        starts.append(num_bytes)
        num_bytes += -(-address.num_bytes // step) * step
    area = address_range(num_bytes)
    for start, address in zip(starts, addresses, strict=True):
        with open_block(address) as fd:
            map_into(area, fd, address.num_bytes, start=start, is_written=is_written)
    return torch.frombuffer(area, dtype=torch.uint8), [start // unit_bytes for start in starts]
