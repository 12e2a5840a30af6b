"""How gradients are cut into buckets that leave during backward, and where these lie."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from paceline.comm.base import Work
from paceline.layout import Layout, in_buckets
from paceline.strategies import bucket_size
from paceline.strategies.base import Context
from paceline.strategies.replica import Replica

FIRST_BUCKET_BYTES = 1_000_000
"""The first bucket is no larger, so that gradients begin to move early in backward."""
WHOLE_BYTES = 1 << 30
"""A bucket that holds all gradients of most models."""


def laid_out(
    context: Context,
    replica: Replica,
    *,
    bucket_mb: float | Literal["auto"],
    behind_backward: bool,
    exchange: Callable[[Tensor], Work],
) -> tuple[Layout, Tensor, dict[str, float]]:
    """The buckets, their memory on the model's device, and what was measured to choose their size. Collective call.

    Args:
        behind_backward: exchanges run behind backward; otherwise more buckets would only be more rounds.
        exchange: starts to average a tensor in place.
    """
    if bucket_mb == "auto" and not behind_backward:
        layout = in_buckets(replica.moved_specs, bucket_bytes=WHOLE_BYTES, first_bucket_bytes=WHOLE_BYTES)
        return layout, allocated(context, layout.num_bytes), {}
    largest_bytes = bucket_size.MIN_BYTES if bucket_mb == "auto" else int(bucket_mb * 1e6)
    layout = cut(replica, largest_bytes)
    buffer = allocated(context, layout.num_bytes)  # larger buckets are fewer, and need less room for their flags
    is_small = layout.num_bytes < bucket_size.MIN_BYTES or len(layout.segments) == 1
    if bucket_mb != "auto" or is_small or context.size == 1:
        return layout, buffer, {}
    found = bucket_size.measured(context.collective, exchange, buffer, now_s=context.pacing.now_s)
    layout = cut(replica, found.num_bytes)
    facts = {
        "bucket_mb": found.num_bytes / 1e6,
        "num_buckets": len(layout.segments),
        "exchange_latency_s": found.latency_s,
        "exchange_bytes_per_s": found.bytes_per_s,
    }
    return layout, buffer[: layout.num_bytes], facts


def cut(replica: Replica, largest_bytes: int) -> Layout:
    """Buckets of at most so many bytes."""
    first_bytes = min(largest_bytes, FIRST_BUCKET_BYTES)
    return in_buckets(replica.moved_specs, bucket_bytes=largest_bytes, first_bucket_bytes=first_bytes)


def allocated(context: Context, num_bytes: int) -> Tensor:
    """Memory that the collective moves fastest, on the model's device."""
    memory = context.collective.allocate(num_bytes)
    return memory if memory.device == context.device else torch.zeros_like(memory, device=context.device)
