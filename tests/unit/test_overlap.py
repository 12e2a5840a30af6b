"""What is hidden behind backward, and how large buckets are to be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Timing, Work
from paceline.strategies.bucket_size import MAX_BYTES, MIN_BYTES, fitting, measured
from paceline.strategies.overlap import Overlap


class _Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


def test_time_under_way_counts_once_and_without_what_the_worker_spent() -> None:
    clock, spent = _Clock(), Timing()
    overlap = Overlap(spent, now_s=lambda: clock.now_s)
    clock.passes(1.0)
    overlap.begin()
    clock.passes(2.0)
    overlap.begin()  # a second bucket beside the first
    clock.passes(3.0)
    spent.communication_s += 0.5
    spent.waiting_s += 0.25
    overlap.end()
    overlap.end()
    clock.passes(7.0)
    assert overlap.timing.hidden_s == pytest.approx(5.0 - 0.75)
    overlap.begin()
    overlap.end()
    assert overlap.timing.hidden_s == pytest.approx(4.25)


@given(st.floats(1e-7, 1.0), st.floats(1e5, 1e11))
def test_a_tenth_of_an_exchange_is_fixed_cost(latency_s: float, bytes_per_s: float) -> None:
    num_bytes = fitting(latency_s, bytes_per_s)
    assert MIN_BYTES <= num_bytes <= MAX_BYTES
    if MIN_BYTES < num_bytes < MAX_BYTES:
        assert latency_s / (latency_s + num_bytes / bytes_per_s) == pytest.approx(0.1, rel=0.01)


class _Slow(Work):
    """An exchange that takes as long as it is told."""

    def __init__(self, clock: _Clock, seconds: float) -> None:
        self._clock, self._until_s = clock, clock.now_s + seconds

    def poll(self) -> bool:
        return self._clock.now_s >= self._until_s

    def wait(self) -> None:
        self._clock.passes(max(0.0, self._until_s - self._clock.now_s))


def test_latency_and_bandwidth_are_found() -> None:
    latency_s, bytes_per_s = 0.005, 200e6
    clock = _Clock()

    def exchange(tensor: Tensor) -> Work:
        return _Slow(clock, latency_s + tensor.nbytes / bytes_per_s)

    scratch = torch.zeros(8_000_000, dtype=torch.uint8)
    found = measured(AloneCollective(), exchange, scratch, now_s=lambda: clock.now_s)
    assert found.latency_s == pytest.approx(latency_s, rel=0.01)  # with the 4 kB that a small exchange moves
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert found.num_bytes == fitting(found.latency_s, found.bytes_per_s)
