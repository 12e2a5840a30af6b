"""How long a core codes: each byte takes time, and so does each operation of the framework of any size."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.codec.base import Codec, Shape, TensorCodec
from paceline.codec.joining import PIECE_ELEMENTS, Region, beginnings, join, parts_of


class Speed(NamedTuple):
    """How fast one core codes."""

    encode_s: float
    """Seconds for a GB of float32."""
    decode_s: float
    operation_s: float = 0.0
    """Seconds of each operation, besides its bytes."""

    @classmethod
    def said(cls, codec: Codec, *, operation_s: float = 0.0) -> "Speed":
        """The speed that the codec itself states for bytes."""
        return cls(*codec.seconds_per_gbyte, operation_s)


_FEW = 2, 4
"""Workers whose exchanges are done to count; where each has as many tensors, there are as many more for each worker
more."""
EDGE = 64
"""Dimensions are counted as no longer than this: operations do not become more with a tensor's size."""


_NUM_TIMED, _NUM_TRIES = 8, 15
"""Workers of an exchange that is timed, and how often it is."""


@final
class _Count(TorchFunctionMode):
    """Counts what is called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.num: int = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


@final
class _Alone:
    """Stands for a group whose other workers have sent what this one would send in their place."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._sent: dict[int, Tensor] = {}

    def average(self, tensor: Tensor) -> None:
        pass

    def start_all_to_all(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        self._sent |= {tensor.numel(): tensor for tensor in tensors}
        return lambda: [self._sent[size] for size in sizes]


def coding_s(
    codec: Codec,
    num_elements: int,
    size: int,
    *,
    speed: Speed | None = None,
    shapes: Sequence[Shape] = (),
    num_exchanges: int = 1,
) -> float:
    """How long one worker encodes and decodes in one exchange, or in so many that have a part of the elements each.

    Args:
        size: of the group.
        speed: of this worker; none: as the codec says of bytes.
        shapes: of the tensors, for codecs that look at them.
    """
    encode_s, decode_s, operation_s = speed or Speed.said(codec)
    both_s = encode_s + decode_s * codec.feedback  # what is left out is found by decoding
    if codec.joint:
        passes_s = encode_s + decode_s
    elif codec.linear:
        passes_s = both_s + decode_s
    elif codec.sparse:
        passes_s = both_s + size * decode_s
    else:  # one's own tensor, everyone's of one's part, the mean of the part, and everyone's means
        passes_s = both_s + decode_s + both_s / size + decode_s
    bytes_s = passes_s * 4 * num_elements / 1e9
    if not operation_s:
        return bytes_s
    return bytes_s + operation_s * num_operations(
        codec, shapes or ((num_elements,),), size, num_exchanges=num_exchanges
    )


def num_operations(codec: Codec, shapes: Sequence[Shape], size: int, *, num_exchanges: int = 1) -> float:
    """How many operations encode, decode and join what one worker has in an average of such tensors among so many. With
    a codec that looks at tensors it is the worker whose part has most of them.

    They are counted by doing so with a few numbers.
    """
    if codec.shaped:
        small = tuple(tuple(min(edge, EDGE) for edge in shape) for shape in shapes)
        return _joined(codec, small, size) if codec.joint or codec.linear else _count(codec, small, size)
    total = sum(math.prod(shape) for shape in shapes)
    found = _joined(codec, (), size)
    is_in_parts = not (codec.sparse or codec.linear)
    return found * max(num_exchanges, math.ceil(total / size / PIECE_ELEMENTS) if is_in_parts else 1)


def message_coding_s(codec: Codec, speed: Speed, num_bytes: float, *, num_tensors: int = 1) -> tuple[float, float]:
    """How long it takes to encode one message of so many bytes of float32, and to decode it.

    Args:
        num_tensors: in it, each of which a codec that looks at tensors codes by itself.
    """
    if not speed.operation_s or not isinstance(codec, TensorCodec):
        return speed.encode_s * num_bytes / 1e9, speed.decode_s * num_bytes / 1e9
    encoding, decoding = (count * (num_tensors if codec.shaped else 1) for count in _encoding(codec))
    return (
        speed.encode_s * num_bytes / 1e9 + encoding * speed.operation_s,
        speed.decode_s * num_bytes / 1e9 + decoding * speed.operation_s,
    )


def operation_s(codec: Codec, device: torch.device | None = None) -> float:
    """Seconds of an operation of this codec here, of so few elements that these do not count: the median of some
    exchanges of a worker with itself."""
    shapes = ((EDGE, EDGE),) if codec.shaped else ()
    exchange = alone(codec, shapes, _NUM_TIMED, device)
    taken_s = []
    with torch.no_grad():
        for _ in range(_NUM_TRIES):
            began_s = time.perf_counter()
            exchange()
            taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s) / _count(codec, shapes, _NUM_TIMED)


@functools.lru_cache(maxsize=256)
def _joined(codec: Codec, shapes: tuple[Shape, ...], size: int) -> float:
    few, more = (_count(codec, shapes, each) for each in _FEW)
    return few + (size - _FEW[0]) * (more - few) / (_FEW[1] - _FEW[0])


@functools.lru_cache(maxsize=256)
def _count(codec: Codec, shapes: tuple[Shape, ...], size: int) -> int:
    return num_called(alone(codec, shapes, size))


def num_called(code: Callable[[], object]) -> int:
    """How many operations of the framework this calls, the second time: what is found out once does not count."""
    with torch.no_grad():
        code()
        count = _Count()
        with count:
            code()
    return count.num


def alone(codec: Codec, shapes: Sequence[Shape], size: int, device: torch.device | None = None) -> Callable[[], None]:
    """Averages ones through the codec each time it is called: one worker's part, as if there were so many.

    Args:
        shapes: of the tensors; none: a block for each worker.
    """
    if not shapes:
        assert isinstance(codec, TensorCodec)
        shapes = ((size * codec.block,),)
    regions, start = [], 0
    for shape in shapes:
        regions.append(Region(start, shape))
        start += regions[-1].num_elements
    parts = parts_of(codec, regions, size)
    peers, like = _Alone(max(range(size), key=lambda rank: len(parts[rank])), size), torch.zeros(start, device=device)
    kept = beginnings(codec, regions, like, rank=peers.rank, size=size, seed=0)
    return lambda: join(codec, peers, torch.ones_like(like), kept, {}, regions=regions, path=(0,), seed=0)


@functools.lru_cache(maxsize=256)
def _encoding(codec: TensorCodec) -> tuple[int, int]:
    tensor = torch.ones(EDGE, EDGE)
    payload = codec.encode(tensor, seed=0)
    return (
        num_called(lambda: codec.encode(tensor, seed=0)),
        num_called(lambda: codec.decode(payload, tensor, seed=0)),
    )
