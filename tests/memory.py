"""How much memory a test's process holds."""

from __future__ import annotations

import ctypes
import gc

import psutil


def held_bytes() -> int:
    """Resident, without what Python would yet collect and the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
