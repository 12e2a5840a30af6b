"""How many threads a process computes with."""

from __future__ import annotations

import os

import torch


def share_of(num_cores: int, num_processes: int) -> int:
    """Of cores that some processes share, those of each; at least one."""
    return max(1, num_cores // max(1, num_processes))


def has_spare_core(num_processes: int) -> bool:
    """Whether the host has more cores than so many processes compute on, each with as many threads as this one."""
    return torch.get_num_threads() * num_processes < len(os.sched_getaffinity(0))


def share_cores(num_processes: int) -> None:
    """Give this process its share of the host's cores for torch's threads."""
    torch.set_num_threads(share_of(len(os.sched_getaffinity(0)), num_processes))
