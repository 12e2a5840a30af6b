"""Broadcasts of large tensors along a chain, and what every rank's model starts from."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.comm.algorithms.chain import PIECE_BYTES, chain, is_worth_a_chain
from paceline.comm.base import Collective
from paceline.strategies.replica import copy_from_first
from tests.unit.collective_examples import same_bits
from tests.unit.collective_harness import World, caught
from tests.unit.test_algorithms import DTYPES, in_threads, values

SIZE = 3


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 9), root=st.integers(0, 8), num_elements=st.integers(0, 300), dtype=st.sampled_from(DTYPES))
def test_every_rank_gets_the_roots_bits(size: int, root: int, num_elements: int, dtype: torch.dtype) -> None:
    root %= size
    tensors = [values(rank, num_elements, dtype) for rank in range(size)]
    expected = tensors[root].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.comm.algorithms.chain.PIECE_BYTES", 64)
        ranks = in_threads(size, lambda rank: chain(rank, tensors[rank.rank], root=root))
    assert all(same_bits(tensor, expected) for tensor in tensors)
    for rank in ranks:
        is_last = (rank.rank + 1) % size == root
        assert sum(num_bytes for _, num_bytes in rank.sent) == (0 if is_last else expected.nbytes)
        assert all(destination == (rank.rank + 1) % size and num_bytes <= 64 for destination, num_bytes in rank.sent)


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World("gloo", SIZE) as opened:
        yield opened


def drawn(rank: int, num_bytes: int) -> Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


def broadcast(collective: Collective, num_bytes: int, dtype: torch.dtype, root: int) -> tuple[Tensor, int]:
    tensor = drawn(collective.rank, num_bytes).view(dtype)
    before = collective.timing.moved_bytes
    collective.broadcast(tensor, root=root)
    return tensor, collective.timing.moved_bytes - before


@pytest.mark.parametrize("root", range(SIZE))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32, torch.complex128], ids=str)
def test_large_tensors_go_along_a_chain_over_gloo(world: World, root: int, dtype: torch.dtype) -> None:
    num_bytes = SIZE * PIECE_BYTES + 4096 + (5 if dtype.itemsize == 1 else 0)
    assert is_worth_a_chain(num_bytes, size=SIZE)
    found = world.run(broadcast, num_bytes, dtype, root)
    assert all(same_bits(tensor, drawn(root, num_bytes).view(dtype)) for tensor, _ in found)
    middle = (root + 1) % SIZE
    assert found[middle][1] >= 2 * num_bytes, "who is in the middle receives and sends everything"


def until_error(collective: Collective) -> tuple[str, str, float]:
    tensor = torch.zeros(4 * SIZE * PIECE_BYTES, dtype=torch.uint8)

    def work() -> None:
        while True:
            collective.broadcast(tensor)

    return caught(work)


@pytest.mark.parametrize("dead", range(SIZE))
def test_survivors_of_a_killed_rank_name_it(dead: int) -> None:
    with World("gloo", SIZE, deadline_s=40.0) as world:
        world.run(Collective.barrier)
        world.start(until_error)
        threading.Event().wait(0.3)
        killed_at = world.kill(dead)
        for rank in set(range(SIZE)) - {dead}:
            kind, message, at = world.result(rank)
            assert kind == "PeerLost", message
            assert f"rank {dead}" in message
            assert at - killed_at < 20.0  # half of the deadline


# --- models -----------------------------------------------------------------------------------------------------------


def model_of(seed: int) -> nn.Module:
    """Parameters and buffers of several dtypes, one of them not contiguous, one empty, one a scalar."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(5, 3, generator=generator))
    model.turned = nn.Parameter(torch.randn(4, 3, generator=generator).t())
    model.half = nn.Parameter(torch.randn(7, generator=generator).bfloat16(), requires_grad=False)
    model.register_buffer("count", torch.tensor(seed))
    model.register_buffer("mask", torch.rand(9, generator=generator) > 0.5)
    model.register_buffer("nothing", torch.empty(0))
    return model


def start_alike(collective: Collective) -> list[Tensor]:
    model = model_of(collective.rank)
    copy_from_first(model, collective)
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def test_models_start_from_rank_0s(world: World) -> None:
    model = model_of(0)
    expected = [*model.parameters(), *model.buffers()]
    for tensors in world.run(start_alike):
        assert all(same_bits(mine, first.detach()) for mine, first in zip(tensors, expected, strict=True))
