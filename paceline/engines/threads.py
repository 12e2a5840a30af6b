"""How many threads a process computes with."""

from __future__ import annotations

import os

import torch


def share_of(num_cores: int, num_processes: int) -> int:
    """Of cores that some processes share, those of each; at least one."""
    return max(1, num_cores // max(1, num_processes))


def share_cores(num_processes: int) -> None:
    """Give this process its share of the host's cores for torch's threads."""
    torch.set_num_threads(share_of(len(os.sched_getaffinity(0)), num_processes))
