"""Caches that hold other things than what is measured."""

from __future__ import annotations

import time
from typing import final

import torch

_CACHE_BYTES = 2**26
"""More than most caches hold, that of all cores included."""


@final
class CacheEmptier:
    """Fills the caches with other things, as cores that hosts share find them when another host has been at work."""

    def __init__(self) -> None:
        self.processor_s = 0.0
        """What that took so far, of this thread: torch is to compute with no other."""
        self._scratch = torch.zeros(_CACHE_BYTES // 4)

    def __call__(self) -> None:
        began_s = time.thread_time()
        self._scratch.add_(1.0)
        self.processor_s += time.thread_time() - began_s
