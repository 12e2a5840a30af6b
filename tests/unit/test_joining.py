"""The mean of what several workers encoded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import pieces
from paceline.codec import DCT, Codec, Int8, PowerSGD, TensorCodec
from paceline.codec.joining import Kept, Region, beginnings, coding_s, join, parts_of, sent_bytes

CODECS = [
    *(cls() for cls in pieces.named(Codec).values() if issubclass(cls, TensorCodec)),
    Int8(scales="rows"),
    DCT(edge=8, keep=8, decay=1),
    PowerSGD(rank=2, start=0),
]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
REGIONS = (Region(0, (40, 30)), Region(1200, (7,)), Region(1216, (30, 40)), Region(2416, (600,)))
TOTAL = 3016  # 9 elements between the second region and the third belong to nobody


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size), [None] * size


class _Thread:
    """One worker of a group, and what it has sent."""

    def __init__(self, meeting: Any, rank: int, size: int) -> None:
        self.rank, self.size, self.sent_bytes = rank, size, 0.0
        self._meeting = meeting

    def average(self, tensor: Tensor) -> None:
        self.sent_bytes += 2 * (self.size - 1) / self.size * tensor.nbytes
        tensor.copy_(torch.stack(self._all(tensor.clone())).mean(0))

    def all_to_all(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        self.sent_bytes += sum(tensor.nbytes for rank, tensor in enumerate(tensors) if rank != self.rank)
        found = [given[self.rank] for given in self._all(tensors)]
        assert [tensor.numel() for tensor in found] == list(sizes)
        return found

    def _all(self, value: Any) -> list[Any]:
        self._meeting.given[self.rank] = value
        self._meeting.barrier.wait()
        found = list(self._meeting.given)
        self._meeting.barrier.wait()
        return found


def regions_for(codec: Codec, total: int = TOTAL) -> Sequence[Region]:
    return REGIONS if codec.shaped else [Region(0, (total,))]


def gradient(rank: int, step: int, total: int = TOTAL) -> Tensor:
    values = torch.randn(total, generator=torch.Generator().manual_seed(100 * rank + step))
    values[1207:1216] = 0  # nobody's
    return values


def exchanged(
    codec: Codec, size: int, steps: int, *, total: int = TOTAL
) -> tuple[list[list[Tensor]], list[Kept], list[float]]:
    """Every worker's means, what it keeps in the end, and the bytes that it has sent."""
    meeting = _Meeting(size)
    peers = [_Thread(meeting, rank, size) for rank in range(size)]
    means: list[list[Tensor]] = [[] for _ in peers]
    kept: list[Kept] = [{} for _ in peers]
    regions = regions_for(codec, total)

    def work(rank: int) -> None:
        kept[rank] = beginnings(codec, regions, gradient(0, 0, total), rank=rank, size=size, seed=9)
        for step in range(steps):
            values = gradient(rank, step, total)
            before = {name: tensor.clone() for name, tensor in kept[rank].items()}
            now = join(codec, peers[rank], values, kept[rank], regions=regions, path=(step,), seed=9)
            assert all(torch.equal(kept[rank][name], before[name]) for name in before)
            kept[rank] = now
            means[rank].append(values)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return means, kept, [each.sent_bytes for each in peers]


@each_codec
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_workers_get_the_same_mean_and_lose_nothing(codec: Codec, size: int) -> None:
    """What was applied, and the workers' mean of what is left, are the mean of all there was."""
    steps = 20
    means, kept, _ = exchanged(codec, size, steps)
    for others in means[1:]:
        assert all(torch.equal(*pair) for pair in zip(means[0], others, strict=True))
    if not codec.feedback or codec.decay != 1:
        return
    total = torch.stack([gradient(rank, step).double() for rank in range(size) for step in range(steps)]).sum(0) / size
    applied = torch.stack(means[0]).double().sum(0)
    left = torch.stack([each["left"] for each in kept]).double().mean(0)
    if "part" in kept[0]:
        for part, each in zip(parts_of(codec, regions_for(codec), size), kept, strict=True):
            start = 0
            for region in part:
                region.of(left).add_(each["part"][start : start + region.num_elements].view(region.shape))
                start += region.num_elements
    assert float((applied + left - total).abs().max()) <= 1e-6 * float(total.abs().max()) + 2e-6


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.unbiased], ids=str)
def test_the_mean_of_an_unbiased_codec_is_unbiased(codec: Codec) -> None:
    """Encoded twice, by the workers and their parts' owners, with draws of their own."""
    steps, size = 400, 2
    means, _, _ = exchanged(codec, size, steps)
    errors = torch.stack(
        [
            mean - torch.stack([gradient(rank, step) for rank in range(size)]).mean(0)
            for step, mean in enumerate(means[0])
        ]
    ).double()
    scores = errors.mean(0) / (errors.std(0) / steps**0.5).clamp_min(1e-6)
    assert float(scores.abs().max()) < 5.5
    assert 0.8 < float(scores[:1200].std()) < 1.2


@each_codec
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_that_plans_count(codec: Codec, size: int) -> None:
    """Up to parts that are not of one size."""
    total = TOTAL if codec.shaped else 4 * 8192
    _, _, sent = exchanged(codec, size, 1, total=total)
    expected = sent_bytes(codec, [region.shape for region in regions_for(codec, total)], size)
    assert sum(sent) / size == pytest.approx(expected, rel=0.4 if codec.shaped else 1e-9)
    assert codec.shaped or sent == [expected] * size


@each_codec
def test_what_a_worker_sends_does_not_grow_with_their_number(codec: Codec) -> None:
    """Of sparse codecs alone, everyone gets, and decodes, everyone's."""
    few, many = (sent_bytes(codec, [(1000, 1000)], size) for size in (2, 64))
    few_s, many_s = (coding_s(codec, 10**6, size) for size in (2, 64))
    if codec.sparse:
        assert many == 63 * few
        assert many_s > few_s
    else:
        assert many <= 2 * few
        assert many_s <= few_s


@each_codec
def test_a_nonfinite_tensor_ends_as_one_that_is_not_applied(codec: Codec) -> None:
    """No codec fails over it, as all workers have yet to learn of it."""

    class Alone(_Thread):
        pass

    alone, regions = Alone(_Meeting(1), 0, 1), regions_for(codec)
    values = gradient(0, 0)
    values[3] = torch.nan
    kept = beginnings(codec, regions, values, rank=0, size=1, seed=0)
    join(codec, alone, values, kept, regions=regions, path=(0,), seed=0)
    assert all(bool(tensor.isfinite().all()) for tensor in kept.values())


def test_nothing_to_send_is_sent_where_workers_are_more_than_blocks() -> None:
    codec = Int8(size=2048)
    assert [len(part) for part in parts_of(codec, [Region(0, (TOTAL,))], 5)] == [1, 1, 0, 0, 0]
    means, _, _ = exchanged(codec, 5, 1)
    assert float((means[4][0] - torch.stack([gradient(rank, 0) for rank in range(5)]).mean(0)).abs().max()) < 0.05
