"""How what several workers encoded becomes their mean, and what that moves and takes, for each kind of codec.

Every function averages one flat tensor over a group of workers, in place, and puts into `now` what this worker keeps
for the next; what it kept before is not changed. The group is whatever has the operations of `Peers`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from paceline.codec.base import Codec, Form, JointCodec, Payload, Shape, TensorCodec, as_bytes
from paceline.codec.memory import memory_of, owed
from paceline.division import divide
from paceline.seeding import derive

PIECE_ELEMENTS = 1 << 17
"""How many elements of a flat tensor are encoded at once, where that makes no difference: they stay in a core's
cache."""
MESSAGE_BYTES = 1 << 20
"""Payloads for one worker that are larger go as several messages, so that what comes behind is encoded, and what is
there is decoded, while others are under way. Halves of 33 MB between 2 hosts of 1 Gbit/s took 163 ms, and take
142."""
Kept = Mapping[str, Tensor]
Keeping = dict[str, Tensor]
"""`left`: what this worker left out. `part`: what it left out of the mean that it encoded for all. `q`: of a codec."""


class Peers(Protocol):
    """What is asked of a group of workers."""

    rank: int
    size: int

    def average(self, tensor: Tensor) -> None:
        """Average the tensor over the group, in place."""

    def start_all_to_all(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Send the i-th of these uint8 tensors to rank i. Returns what waits for, and gives, what each rank sends here,
        of so many bytes; several may be under way, and are over in their order."""


@final
@dataclass(frozen=True)
class Region:
    """A run of a flat tensor, in the shape in which a codec sees it."""

    start: int
    shape: Shape

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.num_elements].view(self.shape)


def beginnings(codec: Codec, regions: Sequence[Region], like: Tensor, *, rank: int, size: int, seed: int) -> Kept:
    """What is kept before the first exchange of this tensor."""
    kept: dict[str, Tensor] = {}
    if codec.feedback:
        kept["left"] = torch.zeros_like(like)
        if not (codec.linear or codec.sparse or codec.joint):
            own = parts_of(codec, regions, size)[rank]
            kept["part"] = like.new_zeros(sum(region.num_elements for region in own))
    if isinstance(codec, JointCodec):
        kept["q"] = codec.begin([region.shape for region in regions], like, seed=derive(seed, "codec"))
    return kept


def parts_of(codec: Codec, regions: Sequence[Region], size: int) -> list[list[Region]]:
    """Each worker's part of a tensor: whole regions of a codec that sees shapes, else about as many elements."""
    total = sum(region.num_elements for region in regions)
    parts: list[list[Region]] = [[] for _ in range(size)]
    if codec.shaped:
        before = 0
        for region in regions:
            parts[min(size - 1, (before + region.num_elements // 2) * size // max(1, total))].append(region)
            before += region.num_elements
        return parts
    assert isinstance(codec, TensorCodec)
    step = -(-total // (size * codec.block)) * codec.block
    piece = max(1, PIECE_ELEMENTS // codec.block) * codec.block
    for rank, start in enumerate(range(0, total, step)):
        stop = min(start + step, total)
        parts[rank] += [Region(at, (min(piece, stop - at),)) for at in range(start, stop, piece)]
    return parts


def join(
    codec: Codec,
    peers: Peers,
    values: Tensor,
    kept: Kept,
    now: Keeping,
    *,
    regions: Sequence[Region],
    path: Sequence[int],
    seed: int,
) -> None:
    """
    Args:
        values: this worker's, 1-D, which become the mean; the same regions on every worker.
        now: gets what is to be kept as soon as it is known. What this worker has left out is complete before the others
            get the last that they need of this worker: so it is, too, if this one then hears nothing.
        path: what tells this exchange from others with the same seed, such as step and bucket.
    """
    if isinstance(codec, JointCodec):
        _by_means(codec, peers, values, kept, now, regions)
        return
    assert isinstance(codec, TensorCodec)
    # Where payloads are added, all draw alike.
    own_seed = derive(seed, "codec", *path, *(() if codec.linear else (peers.rank,)))
    way = _by_sums if codec.linear else _by_gathering if codec.sparse else _by_parts
    way(codec, peers, values, kept, now, regions, own_seed)


def join_all(
    codec: Codec, peers: Peers, values: Tensor, kept: Kept, now: Keeping, *, regions: Sequence[Region]
) -> None:
    """Do what `join` does without the codec: workers send all that they have and owe, and owe nothing afterwards."""
    owing = handed_on(kept, codec, regions, rank=peers.rank, size=peers.size)
    if "left" in owing:
        values.add_(owing["left"], alpha=codec.decay)
    now.update({name: torch.zeros_like(kept[name]) for name in ("left", "part") if name in kept})
    peers.average(values)


def handed_on(kept: Kept, codec: Codec, regions: Sequence[Region], *, rank: int, size: int) -> Kept:
    """What the next codec takes up of what this one kept. `part` is left out of a mean, so it counts `size` times in
    one worker's `left`."""
    if "part" not in kept:
        return kept
    left, start = kept["left"].clone(), 0
    for region in parts_of(codec, regions, size)[rank]:
        region.of(left).add_(kept["part"][start : start + region.num_elements].view(region.shape), alpha=size)
        start += region.num_elements
    return {**{name: tensor for name, tensor in kept.items() if name != "part"}, "left": left}


def _by_sums(
    codec: TensorCodec, peers: Peers, values: Tensor, kept: Kept, now: Keeping, regions: Sequence[Region], seed: int
) -> None:
    """Payloads are averaged."""
    payloads = _encoded(codec, values, kept, now, "left", regions, seed)
    for payload in payloads:
        for tensor in payload:
            peers.average(tensor)
    _decode(codec, payloads, values, regions, seed)


def _by_gathering(
    codec: TensorCodec, peers: Peers, values: Tensor, kept: Kept, now: Keeping, regions: Sequence[Region], seed: int
) -> None:
    """Everyone gets everyone's payloads."""
    payloads = _encoded(codec, values, kept, now, "left", regions, seed)
    mine = _joined(payloads, values)
    everyones = peers.start_all_to_all([mine] * peers.size, [mine.numel()] * peers.size)()
    for rank, raw in enumerate(everyones):
        _decode(codec, _read(codec, raw, regions), values, regions, seed, is_added=rank > 0)
    divide(values, peers.size)


def _by_parts(
    codec: TensorCodec, peers: Peers, values: Tensor, kept: Kept, now: Keeping, regions: Sequence[Region], seed: int
) -> None:
    """Everyone gets everyone's payloads of its own part, and sends its mean, encoded once more, to all. So payloads
    move as an all-reduce would move them, at any number of workers (Tang et al., "1-bit Adam", ICML 2021, figure 3)."""
    parts, rank, size = parts_of(codec, regions, peers.size), peers.rank, peers.size
    own, start = [], 0
    for region in parts[rank]:  # as they lie in the mean of this part alone
        own.append(Region(start, region.shape))
        start += region.num_elements
    mean = values.new_empty(start)
    cuts = _cuts(codec, parts)
    whole = _Encoder(codec, values, kept, now, "left", seed)
    joint = _Encoder(codec, mean, kept, now, "part", derive(seed, "mean"))
    firsts = list(itertools.accumulate((len(part) for part in parts), initial=0))
    payloads, means = [], []
    for cut in cuts:
        outgoing = [
            _joined(whole.encode(part[cut], first + cut.start), values)
            for part, first in zip(parts, firsts, strict=False)
        ]
        if cut is cuts[-1]:
            whole.keep()
        payloads.append(peers.start_all_to_all(outgoing, [outgoing[rank].numel()] * size))
    for cut, arrived in zip(cuts, payloads, strict=True):
        for number, raw in enumerate(arrived()):
            _decode(codec, _read(codec, raw, own[cut]), mean, own[cut], seed, is_added=number > 0)
        for region in own[cut]:
            divide(region.of(mean), size)
        mine = _joined(joint.encode(own[cut], cut.start), values)
        if cut is cuts[-1]:
            joint.keep()
        sizes = [sum(form_of(codec, region.shape).num_bytes for region in part[cut]) for part in parts]
        means.append(peers.start_all_to_all([mine] * size, sizes))
    for cut, arrived in zip(cuts, means, strict=True):
        for part, raw in zip(parts, arrived(), strict=True):
            _decode(codec, _read(codec, raw, part[cut]), values, part[cut], seed)


def _cuts(codec: TensorCodec, parts: Sequence[Sequence[Region]]) -> list[slice]:
    """A slice for each message, one after another: the regions of a part that it carries. All workers cut all parts
    alike."""
    longest = max(len(part) for part in parts)
    num_bytes = max(sum(codec.num_bytes(region.shape) for region in part) for part in parts)
    each = -(-longest // max(1, min(longest, round(num_bytes / MESSAGE_BYTES))))
    return [slice(start, start + each) for start in range(0, longest, each)]


def _by_means(
    codec: JointCodec, peers: Peers, values: Tensor, kept: Kept, now: Keeping, regions: Sequence[Region]
) -> None:
    whole = values + kept["left"] if codec.feedback else values.clone()

    def left_out() -> None:
        if codec.feedback:
            now["left"] = owed(whole)

    own, out = ([region.of(flat) for region in regions] for flat in (whole, values))
    now["q"] = codec.average(own, kept["q"], out=out, mean=peers.average, left_out=left_out)


def _encoded(
    codec: TensorCodec, values: Tensor, kept: Kept, now: Keeping, name: str, regions: Sequence[Region], seed: int
) -> list[Payload]:
    """Encode all regions. What is kept under that name from here on is in `now`."""
    encoder = _Encoder(codec, values, kept, now, name, seed)
    payloads = encoder.encode(regions)
    encoder.keep()
    return payloads


@final
class _Encoder:
    """Encodes regions of a flat tensor, some at a time. What is kept under that name is put into `now` by `keep`."""

    def __init__(self, codec: TensorCodec, values: Tensor, kept: Kept, now: Keeping, name: str, seed: int) -> None:
        self._codec, self._values, self._now, self._name, self._seed = codec, values, now, name, seed
        self._memory, self._before = memory_of(codec), kept.get(name)
        self._after: Tensor | None = None
        if self._before is not None:
            self._after = (torch.zeros_like if codec.shaped else torch.empty_like)(self._before)

    def encode(self, regions: Sequence[Region], first: int = 0) -> list[Payload]:
        """Args: first: number of the first of these regions, from which their seeds derive."""
        payloads = []
        for number, region in enumerate(regions, start=first):
            left = None if self._before is None else region.of(self._before)
            seed = derive(self._seed, number) if number else self._seed
            payload, owed_now = self._memory.encode(self._codec, region.of(self._values), left, seed=seed)
            payloads.append(payload)
            if self._after is not None and owed_now is not None:
                region.of(self._after).copy_(owed_now)
        return payloads

    def keep(self) -> None:
        """All regions are encoded."""
        if self._after is not None:
            self._now[self._name] = self._after


def _decode(
    codec: TensorCodec,
    payloads: Sequence[Payload],
    out: Tensor,
    regions: Sequence[Region],
    seed: int,
    *,
    is_added: bool = False,
) -> None:
    for number, (region, payload) in enumerate(zip(regions, payloads, strict=True)):
        target = region.of(out)
        decoded = codec.decode(payload, target, seed=derive(seed, number) if number else seed)
        target.add_(decoded) if is_added else target.copy_(decoded)


def _joined(payloads: Sequence[Payload], like: Tensor) -> Tensor:
    """As bytes; none for no regions."""
    return as_bytes(tuple(tensor for payload in payloads for tensor in payload) or (like[:0].view(torch.uint8),))


def _read(codec: TensorCodec, raw: Tensor, regions: Sequence[Region]) -> list[Payload]:
    """The inverse of `_joined`."""
    forms = [form_of(codec, region.shape) for region in regions]
    pieces = raw.split([form.num_bytes for form in forms]) if forms else ()
    return [form.read(piece) for form, piece in zip(forms, pieces, strict=True)]


@functools.lru_cache(maxsize=4096)
def form_of(codec: TensorCodec, shape: Shape) -> Form:
    """What its payloads of tensors of this shape look like."""
    return Form.of(codec.encode(torch.zeros(shape), seed=0))


def sent_bytes(codec: Codec, shapes: Sequence[Shape], size: int) -> float:
    """What one worker of a group sends in one exchange of float32 tensors of these shapes."""
    if not codec.shaped:
        shapes = [(sum(math.prod(shape) for shape in shapes),)]
    whole = sum(codec.num_bytes(shape) for shape in shapes)
    return whole * (size - 1) * (1.0 if codec.sparse else 2.0 / size)
