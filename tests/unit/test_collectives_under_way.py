"""Operations that are started before earlier ones are over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.comm.base import Collective
from tests.unit.collective_examples import WORLDS
from tests.unit.collective_harness import World
from tests.unit.many_works import run_many, sums_of_many


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    backend, size = request.param
    with World(backend, size) as world:
        yield world


@pytest.mark.parametrize("order", ["wait", "backwards", "poll", "barrier"])
def test_many_works_under_way(world: World, order: str) -> None:
    for sums in world.run(run_many, order):
        assert sums == sums_of_many(world.size)


def test_more_works_than_signatures_are_kept() -> None:
    with World("shared_memory", 3) as trio:
        assert all(trio.run(run_300_allocated))


def run_300_allocated(collective: Collective) -> bool:
    rows = collective.allocate(300 * 80_000).view(torch.float32).view(300, 20_000).fill_(collective.rank)
    for work in [collective.all_reduce(row) for row in rows]:
        work.wait()
    return bool(rows.eq(3).all())
