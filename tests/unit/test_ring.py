"""The ring all-reduce: its arithmetic among threads, and the same over shared memory among processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective, Finished, Work
from paceline.comm.ring import RingWork, ring_mean
from tests.unit.collective_harness import World

WITHIN_S = 20.0
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Neighbours:
    """Ranks as threads that can only send and receive. Counts what crosses, and who sends to whom."""

    def __init__(self, rank: int, links: dict[tuple[int, int], queue.Queue[Tensor]], size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: list[tuple[int, int]] = []
        self._links = links

    def send(self, tensor: Tensor, *, destination: int) -> Work:
        self.sent.append((destination, tensor.numel()))
        self._links[self.rank, destination].put(tensor.clone())
        return Finished()

    def recv(self, tensor: Tensor, *, source: int) -> None:
        tensor.copy_(self._links[source, self.rank].get(timeout=WITHIN_S))


def run_ring(tensors: list[Tensor]) -> list[Neighbours]:
    """`ring_mean` with one rank a tensor."""
    size = len(tensors)
    links: dict[tuple[int, int], queue.Queue[Tensor]] = {
        (a, b): queue.Queue() for a in range(size) for b in range(size)
    }
    ranks = [Neighbours(rank, links, size) for rank in range(size)]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            ring_mean(cast(Collective, ranks[rank]), tensors[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all(link.empty() for link in links.values()), "something was sent and never received"
    return ranks


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@given(
    size=st.integers(1, 6),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
)
def test_the_mean_of_all_ranks_on_every_rank(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [values(rank, shape, dtype) for rank in range(size)]
    tensors = [tensor.clone() for tensor in inputs]
    run_ring(tensors)
    expected = torch.stack([tensor.double() for tensor in inputs]).mean(0)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(tensors[0].double(), expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), "bits differ between ranks"


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("num_elements", [1, 4, 1000, 1001])
def test_every_rank_sends_as_little_as_the_paper_says_and_to_the_next_only(size: int, num_elements: int) -> None:
    ranks = run_ring([torch.ones(num_elements) for _ in range(size)])
    for rank in ranks:
        assert {destination for destination, _ in rank.sent} == {(rank.rank + 1) % size}
        assert len(rank.sent) == 2 * (size - 1)
        total = sum(count for _, count in rank.sent)
        # 2 (n - 1) / n of the tensor, to the elements by which its chunks differ.
        assert abs(total - 2 * (size - 1) / size * num_elements) <= 2 * (size - 1) / size * (size - 1)
    assert sum(count for rank in ranks for _, count in rank.sent) == 2 * (size - 1) * num_elements


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(RuntimeError, match="view"):
        ring_mean(AloneCollective(), torch.zeros(4, 4).t()[:, :2])


def test_a_world_of_one_keeps_its_tensor() -> None:
    tensor = torch.arange(3.0)
    ring_mean(AloneCollective(), tensor)
    assert tensor.tolist() == [0, 1, 2]


def test_the_work_runs_once_when_it_is_waited_for() -> None:
    tensors = [torch.full((3,), float(rank)) for rank in range(2)]
    links: dict[tuple[int, int], queue.Queue[Tensor]] = {(0, 1): queue.Queue(), (1, 0): queue.Queue()}
    ranks = [Neighbours(rank, links, 2) for rank in range(2)]
    works = [RingWork(cast(Collective, rank), tensor) for rank, tensor in zip(ranks, tensors, strict=True)]
    assert not works[0].poll()
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(work.poll() for work in works)
    num_sent = len(ranks[0].sent)
    works[0].wait()
    assert len(ranks[0].sent) == num_sent
    assert [tensor.tolist() for tensor in tensors] == [[0.5] * 3] * 2


# --- real processes -------------------------------------------------------------------------------------------------

SIZES = (1, 2, 3, 7, 64, 1001, 300_007)


def average(collective: Collective, num_elements: int, dtype: torch.dtype, allocated: bool) -> Tensor:
    """On a rank: the ring over a tensor of its own, or in memory that all map."""
    tensor = values(collective.rank, (num_elements,), dtype)
    if allocated:
        memory = collective.allocate(tensor.numel() * tensor.itemsize).view(dtype)
        tensor = memory.copy_(tensor)
    RingWork(collective, tensor).wait()
    return tensor.clone()


def two_at_once(collective: Collective) -> list[Any]:
    """Two rings that are started together and waited for in order, as buckets are, and a collective between."""
    first, second = torch.full((5000,), float(collective.rank)), torch.full((3,), 10.0 * collective.rank)
    works = [RingWork(collective, first), RingWork(collective, second)]
    for work in works:
        work.poll()
    collective.barrier()
    for work in works:
        work.wait()
    return [first.unique().tolist(), second.unique().tolist()]


@pytest.fixture(scope="module", params=[2, 3, 4, 5])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World("shared_memory", request.param) as opened:
        yield opened


@pytest.mark.parametrize("num_elements", SIZES)
def test_processes_agree_on_the_mean(world: World, num_elements: int) -> None:
    for dtype, allocated in ((torch.float32, False), (torch.float64, True)):
        found = world.run(average, num_elements, dtype, allocated)
        inputs = [values(rank, (num_elements,), dtype) for rank in range(world.size)]
        torch.testing.assert_close(found[0], torch.stack(inputs).mean(0), rtol=1e-5, atol=1e-6)
        assert all(torch.equal(other, found[0]) for other in found), "bits differ between ranks"


def test_rings_wait_for_each_other_in_order(world: World) -> None:
    mean = (world.size - 1) / 2
    assert world.run(two_at_once) == [[[mean], [10 * mean]]] * world.size
