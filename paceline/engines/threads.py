"""How many threads a process computes with."""

from __future__ import annotations

import os

import psutil
import torch


def share_of(num_cores: int, num_processes: int) -> int:
    """Of cores that some processes share, those of each; at least one."""
    return max(1, num_cores // max(1, num_processes))


def spare_cores(num_processes: int) -> int:
    """How many of the host's cores are left where so many processes compute, each with as many threads as this one.

    Of cores with two hardware threads torch uses one each, and the other one is not counted as left.
    """
    num_usable = len(os.sched_getaffinity(0))
    num_cores = min(num_usable, psutil.cpu_count(logical=False) or num_usable)
    return max(0, num_cores - torch.get_num_threads() * num_processes)


def share_cores(num_processes: int) -> None:
    """Give this process its share of the host's cores for torch's threads."""
    torch.set_num_threads(share_of(len(os.sched_getaffinity(0)), num_processes))
