"""Means over shared memory tell where they are not finite, and through whom."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paceline.comm.base import Collective
from tests.unit.collective_examples import SLOT_ELEMENTS
from tests.unit.collective_harness import World

SIZE = 3
SMALL, PIECES, SHARED = 1000, 2 * SLOT_ELEMENTS + 7, 200_001


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World("shared_memory", SIZE) as world:
        yield world


def make(collective: Collective, num_elements: int, dtype: torch.dtype) -> Tensor:
    if num_elements != SHARED:
        return torch.empty(num_elements, dtype=dtype)
    return collective.allocate(num_elements * dtype.itemsize).view(dtype)


def found(
    collective: Collective, num_elements: int, dtype: torch.dtype, bad: float, places: dict[int, int]
) -> list[tuple[int, int] | None]:
    """What the works of three means find, of which the second has `bad` where `places` says, by rank."""
    tensor = make(collective, num_elements, dtype)
    start = collective.watched_mean(tensor)
    assert start is not None
    seen: list[tuple[int, int] | None] = []
    for number in range(3):
        tensor.fill_(collective.rank)
        if number == 1 and collective.rank in places:
            tensor[places[collective.rank]] = bad
        work = start()
        work.wait()
        seen.append(work.nonfinite)
        if number != 1:
            assert tensor.eq((SIZE - 1) / 2).all()
    return seen


@pytest.mark.parametrize("num_elements", [SMALL, PIECES, SHARED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_every_rank_learns_the_first_place_and_its_rank(
    world: World, num_elements: int, dtype: torch.dtype, bad: float
) -> None:
    last = num_elements - 1
    for places in ({0: 0}, {1: last}, {2: num_elements // 2}, {1: last, 2: num_elements // 3}):
        first = min(places.items(), key=lambda place: place[1])
        expected = [None, (first[1], first[0]), None]
        assert world.run(found, num_elements, dtype, bad, places) == [expected] * SIZE


def opposite(collective: Collective) -> object:
    tensor = torch.zeros(SMALL)
    tensor[:2] = torch.tensor([math.inf, -math.inf]) * (1 if collective.rank else -1)
    start = collective.watched_mean(tensor)
    assert start is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = start()
        work.wait()
    return work.nonfinite


def test_infinities_of_both_signs_do_not_cancel(world: World) -> None:
    assert {element for element, _ in world.run(opposite)} == {0}


def large(collective: Collective) -> object:
    tensor = torch.full((SMALL,), 3e38 if collective.rank == 0 else 0.0)
    start = collective.watched_mean(tensor)
    assert start is not None
    work = start()
    work.wait()
    return work.nonfinite


def test_a_sum_over_elements_that_overflows_is_no_mean_that_is_not_finite(world: World) -> None:
    assert world.run(large) == [None] * SIZE


def refusals(collective: Collective) -> list[bool]:
    tensors = (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 4).T[:2])
    return [collective.watched_mean(tensor) is None for tensor in tensors]


def test_what_cannot_be_looked_at_is_not_watched(world: World) -> None:
    assert world.run(refusals) == [[True, True]] * SIZE
