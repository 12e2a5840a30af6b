"""Operations that are started before earlier ones are over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from paceline.comm.base import Collective
from tests.unit.collective_examples import WORLDS
from tests.unit.collective_harness import World


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    backend, size = request.param
    with World(backend, size) as world:
        yield world


@pytest.mark.parametrize("order", ["wait", "backwards", "poll", "barrier"])
def test_many_works_under_way(world: World, order: str) -> None:
    forms = [((40_000,), True), ((3,), True), ((100_000,), False), ((50,), False), ((30_000,), True)] * 14
    for sums in world.run(run_many, forms, order):
        assert sums == [float(sum(number + rank for rank in range(world.size))) for number in range(len(forms))]


def run_many(collective: Collective, forms: Sequence[tuple[tuple[int, ...], bool]], order: str) -> list[float]:
    num_elements = sum(-(-shape[0] // 16) * 16 for shape, _ in forms)
    memory = collective.allocate(4 * num_elements).view(torch.float32)
    tensors, start = [], 0
    for number, (shape, allocated) in enumerate(forms):
        tensor = memory[start : start + shape[0]] if allocated else torch.empty(shape)
        tensors.append(tensor.fill_(number + collective.rank))
        start += -(-shape[0] // 16) * 16
    works = [collective.all_reduce(tensor) for tensor in tensors]
    if order == "backwards":
        works.reverse()
    if order == "poll":
        while unfinished := [work for work in works if not work.poll()]:
            time.sleep(1e-4 * len(unfinished))
    if order == "barrier":
        collective.barrier()
    for work in works:
        work.wait()
    assert all(tensor.eq(tensor[0]).all() for tensor in tensors)
    return [float(tensor[0]) for tensor in tensors]


def test_more_works_than_signatures_are_kept() -> None:
    with World("shared_memory", 3) as trio:
        assert all(trio.run(run_300_allocated))


def run_300_allocated(collective: Collective) -> bool:
    rows = collective.allocate(300 * 80_000).view(torch.float32).view(300, 20_000).fill_(collective.rank)
    for work in [collective.all_reduce(row) for row in rows]:
        work.wait()
    return bool(rows.eq(3).all())
