"""How much memory a test's process holds."""

from __future__ import annotations

import ctypes
import gc

import psutil


def held_bytes() -> int:
    """Resident and its own: without what Python would yet collect, what the allocator keeps, and mapped files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
