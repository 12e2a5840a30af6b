"""The gradient buckets that all-reduce would make of a model, and when in a step each is full."""

from dataclasses import dataclass

import torch

from paceline.layout import Layout, TensorSpec, in_buckets
from paceline.outer import dealt_out
from paceline.planner.setting import Setting
from paceline.strategies import bucket_size
from paceline.strategies.bucketing import FIRST_BUCKET_BYTES, WHOLE_BYTES
from paceline.strategies.traits import AllReduced


@dataclass(frozen=True)
class Bucket:
    """Some parameters' gradients, which move together."""

    num_bytes: float
    tensors: tuple[int, ...]
    """Their places in the optimizer's order."""


def of(traffic: AllReduced, setting: Setting) -> list[Bucket]:
    """As strategies lay them out; sizes found by measuring are those that the measurement would find here."""
    if traffic.bucket_mb != "auto":
        return _cut(setting, int(traffic.bucket_mb * 1e6))
    if not traffic.behind_backward:
        return _cut(setting, WHOLE_BYTES, WHOLE_BYTES)
    small = _cut(setting, bucket_size.MIN_BYTES)
    total = sum(bucket.num_bytes for bucket in small)
    if total < bucket_size.MIN_BYTES or len(small) == 1 or setting.num_workers == 1:
        return small
    large_bytes = min(total, bucket_size.LARGE_BYTES)
    small_s, large_s = (sum(setting.ring.parts_s(num_bytes)) for num_bytes in (bucket_size.SMALL_BYTES, large_bytes))
    bytes_per_s = (large_bytes - bucket_size.SMALL_BYTES) / max(large_s - small_s, 1e-9)
    return _cut(setting, bucket_size.fitting(small_s + setting.operation_s, bytes_per_s))


def of_fragments(traffic: AllReduced, setting: Setting) -> list[Bucket]:
    """As `LocalUpdates` deals them out. Raises UsageError if tensors are too few."""
    sizes = setting.work.tensor_bytes
    members: list[list[int]] = [[] for _ in range(traffic.fragments)]
    for tensor, fragment in enumerate(dealt_out(sizes, traffic.fragments)):
        members[fragment].append(tensor)
    return [Bucket(float(sum(sizes[tensor] for tensor in own)), tuple(own)) for own in members]


def ready_parts(buckets: list[Bucket], setting: Setting) -> list[float]:
    """The part of a step's computing after which each bucket is full: the forward pass, and backward so far."""
    share = setting.cluster.compute.backward_share
    done, parts = 0.0, []
    for bucket in buckets:
        done += sum(setting.work.shares[tensor] for tensor in bucket.tensors)
        parts.append(1 - share + share * min(done, 1.0))
    return parts


def _cut(setting: Setting, largest_bytes: int, first_bytes: int = FIRST_BUCKET_BYTES) -> list[Bucket]:
    specs = [TensorSpec(str(number), (size,), torch.uint8) for number, size in enumerate(setting.work.tensor_bytes)]
    layout: Layout = in_buckets(specs, bucket_bytes=largest_bytes, first_bucket_bytes=min(largest_bytes, first_bytes))
    return [Bucket(float(s.num_bytes), tuple(slot.index for slot in s.slots)) for s in layout.segments]
