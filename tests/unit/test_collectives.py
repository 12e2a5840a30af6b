"""Every operation that moves tensors as they are, on every collective, against a naive twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from tests.unit.collective_examples import MOVABLE, WORLDS, Spec, check, one_each, same_bits, specs
from tests.unit.collective_harness import World


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    backend, size = request.param
    with World(backend, size) as world:
        yield world


def run_broadcast(collective: Collective, spec: Spec, root: int) -> Tensor:
    tensor = spec.make(collective.rank)
    collective.broadcast(tensor, root=root)
    return tensor


def run_all_gather(collective: Collective, each: Sequence[Spec]) -> list[Tensor]:
    return collective.all_gather(each[collective.rank].make(collective.rank))


def run_all_to_all(collective: Collective, table: Sequence[Sequence[Spec]]) -> list[Tensor]:
    mine = [spec.make(100 * collective.rank + other) for other, spec in enumerate(table[collective.rank])]
    return collective.all_to_all(mine)


def run_gather(collective: Collective, each: Sequence[Spec], root: int) -> list[Tensor] | None:
    return collective.gather(each[collective.rank].make(collective.rank), root=root)


def run_scatter(collective: Collective, row: Sequence[Spec], root: int) -> Tensor:
    tensors = [spec.make(other) for other, spec in enumerate(row)]
    return collective.scatter(tensors if collective.rank == root else None, root=root)


def run_objects(collective: Collective) -> tuple[list[Any], Any]:
    value = {"rank": collective.rank, "shape": [1] * collective.rank}
    gathered = collective.all_gather_object(value)
    collective.require_equal("setting", "the same")
    last = collective.size - 1
    assert collective.gather_object(value, root=last) == (gathered if collective.rank == last else None)
    return gathered, collective.broadcast_object(value, root=collective.size - 1)


def test_broadcast(world: World) -> None:
    def test(example: tuple[Spec, int]) -> None:
        spec, root = example
        for result in world.run(run_broadcast, spec, root):
            assert same_bits(result, spec.make(root))

    check(world, st.tuples(specs(MOVABLE), st.integers(0, world.size - 1)), test)


def test_all_gather(world: World) -> None:
    def test(each: list[Spec]) -> None:
        expected = [spec.make(rank) for rank, spec in enumerate(each)]
        for result in world.run(run_all_gather, each):
            assert all(map(same_bits, result, expected))

    check(world, st.sampled_from(MOVABLE).flatmap(lambda dtype: one_each(world.size, dtype)), test)


def test_all_to_all(world: World) -> None:
    def test(table: list[list[Spec]]) -> None:
        for rank, result in enumerate(world.run(run_all_to_all, table)):
            expected = [table[other][rank].make(100 * other + rank) for other in range(world.size)]
            assert all(map(same_bits, result, expected))

    def tables(dtype: torch.dtype) -> st.SearchStrategy[list[list[Spec]]]:
        return st.lists(one_each(world.size, dtype), min_size=world.size, max_size=world.size)

    check(world, st.sampled_from(MOVABLE).flatmap(tables), test)


def test_gather(world: World) -> None:
    def test(example: tuple[list[Spec], int]) -> None:
        each, root = example
        for rank, result in enumerate(world.run(run_gather, each, root)):
            if rank == root:
                assert all(map(same_bits, result, [spec.make(other) for other, spec in enumerate(each)]))
            else:
                assert result is None

    rows = st.sampled_from(MOVABLE).flatmap(lambda dtype: one_each(world.size, dtype))
    check(world, st.tuples(rows, st.integers(0, world.size - 1)), test)


def test_scatter(world: World) -> None:
    def test(example: tuple[list[Spec], int]) -> None:
        row, root = example
        for rank, result in enumerate(world.run(run_scatter, row, root)):
            assert same_bits(result, row[rank].make(rank))

    rows = st.sampled_from(MOVABLE).flatmap(lambda dtype: one_each(world.size, dtype))
    check(world, st.tuples(rows, st.integers(0, world.size - 1)), test)


def test_only_what_is_needed_moves() -> None:
    with World("shared_memory", 3) as trio:
        gathered, scattered = zip(*trio.run(run_counted), strict=True)
    expected = pytest.approx((4_000_000, 8_000_000, 4_000_000), abs=1000)  # ranks also tell each other shapes
    assert gathered == expected
    assert scattered == expected


def run_counted(collective: Collective) -> tuple[int, int]:
    tensor = torch.ones(1_000_000)
    collective.barrier()
    start = collective.timing.moved_bytes
    collective.gather(tensor, root=1)
    after_gather = collective.timing.moved_bytes
    collective.scatter([tensor] * 3 if collective.rank == 1 else None, root=1)
    return after_gather - start, collective.timing.moved_bytes - after_gather


def test_objects(world: World) -> None:
    expected = [{"rank": rank, "shape": [1] * rank} for rank in range(world.size)]
    for gathered, from_last in world.run(run_objects):
        assert gathered == expected
        assert from_last == expected[-1]


def test_alone_returns_copies() -> None:
    alone, tensor = AloneCollective(), torch.ones(3)
    gathered, scattered = alone.gather(tensor), alone.scatter([tensor])
    assert gathered is not None
    for result in (
        *gathered,
        scattered,
        *alone.all_gather(tensor),
        *alone.all_to_all([tensor]),
        alone.reduce_scatter([tensor]),
    ):
        result.zero_()
    assert tensor.tolist() == [1, 1, 1]
