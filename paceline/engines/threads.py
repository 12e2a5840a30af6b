"""How many threads a process computes with."""

from __future__ import annotations

import os

import torch


def share_cores(num_processes: int) -> int:
    """Give this process its share of the host's cores for torch's threads; returns how many."""
    num_threads = max(1, len(os.sched_getaffinity(0)) // max(1, num_processes))
    torch.set_num_threads(num_threads)
    return num_threads
