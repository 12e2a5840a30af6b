"""Blocks of several processes in one range of addresses, so that one tensor has them all."""

import ctypes
import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.shared_memory.block import BlockAddress, open_block

_FIXED, _NO_RESERVE, _FAILED = 0x10, 0x4000, ctypes.c_void_p(-1).value  # mmap(2), as Linux numbers them

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def side_by_side(addresses: Sequence[BlockAddress], *, unit_bytes: int) -> tuple[Tensor, list[int]]:
    """A uint8 tensor over all these blocks, and the unit at which each of them begins; units between blocks are 0.

    Args:
        unit_bytes: blocks begin at a multiple of it.

    Raises:
        PeerLost: as `open_block`.
    """
    step = math.lcm(unit_bytes, mmap.PAGESIZE)
    starts, num_bytes = [], 0
    for address in addresses:
        starts.append(num_bytes)
        num_bytes += -(-address.num_bytes // step) * step
    # It takes up addresses; the blocks are mapped over it, and unmapped with it when the last tensor on it goes.
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    for start, address in zip(starts, addresses, strict=True):
        with open_block(address) as fd:
            place, access = memory.data_ptr() + start, mmap.PROT_READ | mmap.PROT_WRITE
            if _mmap(place, address.num_bytes, access, mmap.MAP_SHARED | _FIXED, fd, 0) == _FAILED:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
    return memory, [start // unit_bytes for start in starts]
