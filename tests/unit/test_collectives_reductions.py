"""Every reduction of every dtype, on every collective, against a naive twin and against gloo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.base import REDUCE_OPS, Collective, ReduceOp
from tests.unit.collective_examples import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    NO_MEAN,
    WORLDS,
    Spec,
    check,
    one_each,
    reduce_naively,
    require_same,
    same_bits,
    specs,
)
from tests.unit.collective_harness import World

REDUCIBLE = st.one_of(
    st.tuples(specs((*FLOATS, *INTEGERS)), st.sampled_from(REDUCE_OPS), st.booleans()),
    st.tuples(specs((torch.bool,)), st.sampled_from(NO_MEAN), st.booleans()),
    st.tuples(specs(COMPLEX), st.sampled_from(("sum", "mean")), st.booleans()),
)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    backend, size = request.param
    with World(backend, size) as world:
        yield world


def run_all_reduce(collective: Collective, spec: Spec, op: ReduceOp, allocated: bool) -> Tensor:
    tensor = spec.make(collective.rank)
    if allocated and tensor.numel():
        memory = collective.allocate(tensor.nbytes + 64)[64:].view(tensor.dtype).view(tensor.shape)
        tensor = memory.copy_(tensor)
    strides = tensor.stride()
    collective.all_reduce(tensor, op=op).wait()
    assert tensor.stride() == strides
    return tensor.clone()


def run_reduce_scatter(collective: Collective, row: Sequence[Spec], op: ReduceOp) -> Tensor:
    mine = [spec.make(100 * collective.rank + other) for other, spec in enumerate(row)]
    return collective.reduce_scatter(mine, op=op)


def test_all_reduce(world: World) -> None:
    def test(example: tuple[Spec, ReduceOp, bool]) -> None:
        spec, op, allocated = example
        expected = reduce_naively([spec.make(rank) for rank in range(world.size)], op)
        results = world.run(run_all_reduce, spec, op, allocated)
        for result in results:
            require_same(world, result, expected)
            assert same_bits(result, results[0])

    check(world, REDUCIBLE, test)


def test_mean_of_integers_truncates_towards_zero(world: World) -> None:
    results = world.run(run_minus_three)
    assert all(result.tolist() == [-3, int(-(2 * world.size + 1) / world.size)] for result in results)


def run_minus_three(collective: Collective) -> Tensor:
    tensor = torch.tensor([-3, -3 if collective.rank == 0 else -2])
    collective.all_reduce(tensor, op="mean").wait()
    return tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_elements", [3, 50_000])
def test_half_precision_is_accumulated_in_single(world: World, dtype: torch.dtype, num_elements: int) -> None:
    # The spacing of float16 above 2048 is 2, that of bfloat16 above 256 is 2: added one by one, ones would be lost.
    big = 2048 if dtype == torch.float16 else 256
    expected = torch.tensor(float(big + world.size - 1)).to(dtype)
    for result in world.run(run_big_and_ones, dtype, big, num_elements):
        assert result.eq(expected).all()


def run_big_and_ones(collective: Collective, dtype: torch.dtype, big: int, num_elements: int) -> Tensor:
    tensor = torch.full((num_elements,), float(big) if collective.rank == 0 else 1.0, dtype=dtype)
    collective.all_reduce(tensor).wait()
    return tensor


def test_reduce_scatter(world: World) -> None:
    def test(example: tuple[list[Spec], ReduceOp]) -> None:
        row, op = example
        for rank, result in enumerate(world.run(run_reduce_scatter, row, op)):
            expected = reduce_naively([row[rank].make(100 * other + rank) for other in range(world.size)], op)
            assert same_bits(result, expected)

    rows = st.sampled_from((*FLOATS, *INTEGERS)).flatmap(lambda dtype: one_each(world.size, dtype))
    check(world, st.tuples(rows, st.sampled_from(REDUCE_OPS)), test)


def test_gradients_are_refused_no_part() -> None:
    tensor = torch.ones(3, requires_grad=True)
    with World("shared_memory", 2) as pair:
        assert pair.run(run_leaf, tensor.detach()) == [[2.0, 2.0, 2.0]] * 2


def run_leaf(collective: Collective, tensor: Tensor) -> list[float]:
    leaf = tensor.clone().requires_grad_()
    collective.all_reduce(leaf).wait()
    assert leaf.is_leaf
    return leaf.tolist()


def test_shared_memory_agrees_with_gloo() -> None:
    """To the bit: of two terms there is one order only."""
    with World("shared_memory", 2) as one, World("gloo", 2) as other:

        def test(example: tuple[Spec, ReduceOp, bool]) -> None:
            pairs = zip(one.run(run_all_reduce, *example), other.run(run_all_reduce, *example), strict=True)
            assert all(same_bits(*pair) for pair in pairs)

        check(one, REDUCIBLE, test)


def run_out_of_inference_mode(collective: Collective) -> list[float]:
    """What an evaluation has asked for first is asked for again."""
    found = []
    for num, dtype in itertools.product((3, 70_000), (torch.float32, torch.bfloat16, torch.int64)):
        for is_in in (True, False):
            with torch.inference_mode(is_in):
                total = torch.ones(num, dtype=dtype)
                collective.all_reduce(total, op="sum").wait()
                found += total[::num].tolist()
    return found


def test_what_is_kept_of_inference_mode_can_be_written_to(world: World) -> None:
    for found in world.run(run_out_of_inference_mode):
        assert found == [world.size] * 12
