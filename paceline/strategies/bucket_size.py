"""The size of gradient buckets, from what an exchange costs here."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.base import Collective, Work

MIN_BYTES, MAX_BYTES = 256 * 1024, 32 * 1024 * 1024
SMALL_BYTES, LARGE_BYTES = 4096, 4 * 1024 * 1024
_NUM_SMALL, _NUM_LARGE = 9, 3
_FIXED_SHARE = 0.1
"""How much of a bucket's exchange may be cost that does not depend on its size. Smaller buckets leave earlier and hide
more behind backward; each one costs the fixed part again."""


@dataclass(frozen=True)
class BucketSize:
    """What was measured, and the size that follows from it."""

    latency_s: float
    """What an exchange takes however little it moves."""
    bytes_per_s: float
    num_bytes: int


def measured(
    collective: Collective,
    exchange: Callable[[Tensor], Work],
    scratch: Tensor,
    *,
    now_s: Callable[[], float] = time.perf_counter,
) -> BucketSize:
    """Time a small and a large exchange, and find the size whose fixed cost is a tenth of its transfer time.

    Collective call; the same result on every rank, that of the slowest.

    Args:
        exchange: starts to average a tensor in place.
        scratch: uint8 tensor of zeros, at least `MIN_BYTES` long; zeros again afterwards.
        now_s: the clock.
    """
    small = scratch[:SMALL_BYTES].view(torch.float32)
    large = scratch[: min(scratch.numel(), LARGE_BYTES) // 4 * 4].view(torch.float32)
    times = torch.tensor(
        [
            _seconds(collective, exchange, small, _NUM_SMALL, now_s),
            _seconds(collective, exchange, large, _NUM_LARGE, now_s),
        ],
        dtype=torch.float64,
        device=scratch.device,
    )
    collective.all_reduce(times, op="max").wait()
    small_s, large_s = times.tolist()
    bytes_per_s = (large.nbytes - small.nbytes) / max(large_s - small_s, 1e-9)
    return BucketSize(small_s, bytes_per_s, fitting(small_s, bytes_per_s))


def fitting(latency_s: float, bytes_per_s: float) -> int:
    """The size in bytes, within bounds."""
    return int(min(max(latency_s * bytes_per_s * (1 / _FIXED_SHARE - 1), MIN_BYTES), MAX_BYTES))


def _seconds(
    collective: Collective,
    exchange: Callable[[Tensor], Work],
    tensor: Tensor,
    count: int,
    now_s: Callable[[], float],
) -> float:
    """The median of some exchanges, after one to warm up."""
    taken: list[float] = []
    for _ in range(1 + count):
        collective.barrier()
        began_s = now_s()
        exchange(tensor).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        taken.append(now_s() - began_s)
    return statistics.median(taken[1:])
