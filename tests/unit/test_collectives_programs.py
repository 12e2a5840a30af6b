"""Random sequences of all operations against naive twins, and what thousands of them leave behind."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.base import Collective
from tests.distributed.harness import shared_memory, shared_memory_left
from tests.unit.collective_examples import check, same_bits
from tests.unit.collective_harness import World
from tests.unit.collective_programs import KINDS, expected, perform, random_calls, start

WORLDS = [("shared_memory", 2), ("shared_memory", 3), ("shared_memory", 4), ("gloo", 2), ("gloo", 3)]
IDS = [f"{backend}-{size}" for backend, size in WORLDS]


def run_in_turn(collective: Collective, seed: int, num_calls: int, is_exact: bool) -> str:
    """Empty, or the first operation that gave something else than its twin."""
    for call in itertools.islice(random_calls(seed, size=collective.size), num_calls):
        results = perform(collective, call)
        twins = expected(call, collective.rank, collective.size)
        if len(results) != len(twins) or not all(map(same_bits if is_exact else is_close, results, twins)):
            return repr(call)
    return ""


def run_under_way(collective: Collective, seed: int, num_calls: int, is_exact: bool) -> str:
    """As `run_in_turn`, but what is asynchronous is waited for at the end only, in an order of this rank's own."""
    calls = list(itertools.islice(random_calls(seed, size=collective.size), num_calls))
    started = [(call, *start(collective, call)) for call in calls]
    generator = random.Random(seed + collective.rank)
    for call, works, results in generator.sample(started, len(started)):
        for work in works:
            if generator.random() < 0.3:
                work.poll()
            work.wait()
        twins = expected(call, collective.rank, collective.size)
        if len(results) != len(twins) or not all(map(same_bits if is_exact else is_close, results, twins)):
            return repr(call)
    return ""


def is_close(got: Tensor, twin: Tensor) -> bool:
    """Up to the order of additions; a product of many reaches infinity in any order."""
    return got.shape == twin.shape and got.dtype == twin.dtype and torch.allclose(got, twin, rtol=2e-2, equal_nan=True)


@pytest.mark.parametrize(("backend", "size"), WORLDS, ids=IDS)
@pytest.mark.parametrize("run", [run_in_turn, run_under_way])
def test_any_order_of_operations(backend: str, size: int, run: Callable[..., str]) -> None:
    with World(backend, size) as world:

        def test(example: tuple[int, int]) -> None:
            seed, num_calls = example
            assert world.run(run, seed, num_calls, backend != "gloo") == [""] * size

        check(world, st.tuples(st.integers(0, 10**6), st.integers(1, 12)), test)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "size", "num_calls"), [("shared_memory", 3, 4_000), ("gloo", 2, 3_000)])
def test_mixed_operations_leak_nothing(backend: str, size: int, num_calls: int) -> None:
    before = shared_memory()
    with World(backend, size) as world:
        world.start(run_soak, num_calls)
        for rank in range(size):
            num_descriptors, leaked_bytes = world.result(rank, within_s=500.0)
            assert num_descriptors == 0
            assert leaked_bytes < 512
        assert not shared_memory_left(before)


def run_soak(collective: Collective, num_calls: int) -> tuple[int, float]:
    """Descriptors gained by operations, and bytes of resident memory an operation.

    The allocator and torch gain some megabytes in the first thousand operations, and a few at once now and then; a leak
    goes on. So the first half warms up, and the median over ten parts of the second half counts.
    """
    calls = random_calls(1, size=collective.size, kinds=KINDS)
    small = (replace(call, num_elements=min(call.num_elements, 5000)) for call in calls)
    process = psutil.Process()
    part = num_calls // 20
    descriptors, resident_bytes = [], []
    for num_in_part in (num_calls // 2, *[part] * 10):
        for call in itertools.islice(small, num_in_part):
            perform(collective, call)
        gc.collect()
        descriptors.append(process.num_fds())
        resident_bytes.append(process.memory_info().rss)
    growth_bytes = [after - before for before, after in itertools.pairwise(resident_bytes)]
    return descriptors[-1] - descriptors[0], statistics.median(growth_bytes) / part
