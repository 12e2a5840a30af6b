"""What a codec makes of an exchange: other bytes on links, and time to encode and to decode."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar, final

import numpy as np
import torch

from paceline.codec import Auto, Codec, Shape, TensorCodec, chosen
from paceline.codec.costs import Speed, coding_s
from paceline.layout import NUM_FLAGS
from paceline.planner import costs, filling
from paceline.planner.demand import StepWork
from paceline.planner.fabric import Loads
from paceline.planner.setting import Setting
from paceline.strategies.traits import AllReduced, Neighbouring

_LITTLE = 0.01  # of a tensor, in squares: far less than the noise in a gradient
_NUM_TRIED = 1 << 16


@final
class CodedMean(NamedTuple):
    """An average of gradients, all workers beginning at once."""

    time_s: float
    loads: Loads


_Coded = TypeVar("_Coded", bound=AllReduced | Neighbouring)


def settled(traffic: _Coded, setting: Setting, step_s: Callable[[_Coded], float]) -> _Coded:
    """With the codec that `auto` would choose, if it is to choose one.

    Args:
        step_s: what steps take with such an exchange.
    """
    if not isinstance(traffic.codec, Auto):
        return traffic
    plain = replace(traffic, codec=None)
    if setting.num_workers == 1:
        return plain
    coded = {codec: _coded_by(codec, traffic, setting) for codec in traffic.codec.candidates}
    codec = chosen(step_s(plain), {codec: step_s(each) for codec, each in coded.items()}).codec
    return plain if codec is None else coded[codec]


def _coded_by(codec: Codec, traffic: _Coded, setting: Setting) -> _Coded:
    """Buckets stay as they were."""
    if isinstance(traffic, AllReduced):
        has_flags = traffic.has_flags and len(filling.of(traffic, setting)) == 1
        return replace(traffic, codec=codec, behind_backward=False, has_flags=has_flags)
    return replace(traffic, codec=codec)


def coded_mean(
    codec: Codec,
    scope: Literal["links", "all"],
    setting: Setting,
    *,
    tensors: Sequence[int] | None = None,
    num_buckets: int = 1,
) -> CodedMean | None:
    """None where nothing is coded, since all workers are on one host.

    Args:
        tensors: those that are averaged; none: all.
        num_buckets: each of which is averaged by itself.
    """
    leaders = setting.ring.leaders
    if scope == "links" and len(leaders) == 1:
        return None
    hosts = leaders if scope == "links" else np.array(setting.places.workers)
    fabric, size = setting.fabric, len(hosts)
    work = setting.work if tensors is None else _part(setting.work, tensors)
    total = payload_bytes(codec, work)
    num_elements = work.parameter_bytes // 4
    speed = min(setting.cluster.each_host()[host].speed for host in hosts.tolist())
    each = Speed.said(codec, operation_s=setting.cluster.communication.coding_s)
    each_s = coding_s(codec, num_elements, size, speed=each, shapes=shapes_of(work), num_exchanges=num_buckets)
    time_s = setting.queued_s(each_s / speed)
    loads = fabric.nothing
    if size > 1 and (codec.joint or codec.linear):
        ring = setting.ring_among(hosts, np.zeros_like(hosts))
        rounds = 2 if codec.joint else 1
        time_s += rounds * (sum(ring.parts_s(total / rounds)) + setting.operation_s)
        loads = loads + ring.loads(total)
    elif size > 1:
        sent, rounds = (total, 1) if codec.sparse else (total / size, 2)
        among = fabric.everyone_to_everyone(hosts, hosts, sent) + fabric.messages(hosts, hosts, -sent)
        time_s += rounds * float(fabric.farthest_s(hosts, hosts).max())
        each_s = fabric.busiest(among).busy_s / (size - 1)
        alone_s = costs.burst_s(size - 1, each_s=each_s, **setting.posting)
        time_s += rounds * max(alone_s, setting.burst_turn_s(hosts, size - 1))
        loads = loads + among * rounds
    if scope == "links" and setting.ring.num_inner.any():  # the ranks of a host hand theirs to the first, and back
        inner = fabric.messages(leaders, leaders, setting.ring.num_inner.astype(np.float64) * 2 * work.parameter_bytes)
        time_s += fabric.busiest(inner).busy_s
        loads = loads + inner
    return CodedMean(time_s, loads)


def coded_exchange(traffic: AllReduced, setting: Setting) -> CodedMean | None:
    """A step's average of gradients; None where nothing is coded.

    Flags are averaged first, by themselves. Of several buckets, the last one's are under way while the first is coded.
    """
    assert traffic.codec is not None
    num_buckets = len(filling.of(traffic, setting))
    coded = coded_mean(traffic.codec, traffic.codec_scope, setting, num_buckets=num_buckets)
    if coded is None or not traffic.has_flags or num_buckets > 1:
        return coded
    num_bytes = 4 * (NUM_FLAGS + len(setting.work.tensor_bytes))
    time_s = coded.time_s + sum(setting.ring.parts_s(num_bytes))
    return CodedMean(time_s, coded.loads + setting.ring.loads(num_bytes))


def _part(work: StepWork, tensors: Sequence[int]) -> StepWork:
    return replace(
        work,
        tensor_bytes=tuple(work.tensor_bytes[tensor] for tensor in tensors),
        tensor_shapes=tuple(work.tensor_shapes[tensor] for tensor in tensors) if work.tensor_shapes else (),
    )


def payload_bytes(codec: Codec, work: StepWork) -> float:
    """Of one worker's gradients."""
    shapes = shapes_of(work)
    if not codec.shaped:
        shapes = [(sum(math.prod(shape) for shape in shapes),)]
    return float(sum(codec.num_bytes(shape) for shape in shapes))


def bytes_apart(codec: Codec, work: StepWork) -> float:
    """The size of one worker's coded gradients, or of a change as large, where each tensor is coded by itself."""
    if codec.shaped or work.tensor_shapes:
        return float(sum(map(codec.num_bytes, shapes_of(work))))
    return float(sum(codec.num_bytes((size // 4,)) for size in work.tensor_bytes))


def shapes_of(work: StepWork) -> Sequence[Shape]:
    """Tensors of unknown shapes count as square matrices."""
    if work.tensor_shapes:
        return work.tensor_shapes
    counts = [max(1, size // 4) for size in work.tensor_bytes]
    return [(max(1, math.isqrt(count)), count // max(1, math.isqrt(count))) for count in counts]


@lru_cache(maxsize=256)
def leaves_out_little(codec: Codec) -> bool:
    """Whether steps to a target are as many with it as without: it hardly changes a tensor of normal numbers."""
    if isinstance(codec, Auto):
        return all(leaves_out_little(each) for each in codec.candidates)
    if not isinstance(codec, TensorCodec):
        return False
    tensor = torch.randn(_NUM_TRIED, generator=torch.Generator().manual_seed(0))
    decoded = codec.decode(codec.encode(tensor, seed=0), tensor, seed=0)
    return float((decoded - tensor).square().sum() / tensor.square().sum()) < _LITTLE
