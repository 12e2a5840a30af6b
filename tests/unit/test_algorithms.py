"""The all-reduce algorithms: their arithmetic and their messages among threads, and the same among processes."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.algorithms import ALGORITHMS, AlgorithmWork
from paceline.comm.algorithms import pieces as messages
from paceline.comm.algorithms.partial_sum import SumOrMean
from paceline.comm.algorithms.tree import _places
from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective, Work
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.strategies.all_reduce import Algorithm, AllReduce
from paceline.strategies.base import Context
from tests.unit.collective_harness import World, caught

WITHIN_S = 60.0
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.complex64)
NAMES = tuple(ALGORITHMS)


# --- ranks as threads -------------------------------------------------------------------------------------------------


@dataclass
class Parcel(Work):
    """One side of a message."""

    tensor: Tensor
    is_over: threading.Event = field(default_factory=threading.Event)

    def poll(self) -> bool:
        return self.is_over.is_set()

    def wait(self) -> None:
        assert self.is_over.wait(WITHIN_S), "the other side of a message never came"


class Link:
    """From one rank to another. A message is read where it lies once the receiver is there too: nothing is buffered."""

    def __init__(self) -> None:
        self.sent: deque[Parcel] = deque()
        self.awaited: deque[Parcel] = deque()
        self._lock = threading.Lock()

    def post(self, queue: deque[Parcel], tensor: Tensor) -> Work:
        parcel = Parcel(tensor)
        with self._lock:
            queue.append(parcel)
            if self.sent and self.awaited:
                source, target = self.sent.popleft(), self.awaited.popleft()
                assert (source.tensor.shape, source.tensor.dtype) == (target.tensor.shape, target.tensor.dtype)
                target.tensor.copy_(source.tensor)
                source.is_over.set()
                target.is_over.set()
        return parcel


class Rank:
    """All that an algorithm may use of a collective. Counts what it sends."""

    def __init__(self, rank: int, size: int, links: dict[tuple[int, int], Link]) -> None:
        self.rank, self.size = rank, size
        self.sent: list[tuple[int, int]] = []  # destination, bytes
        self.posted: list[Work] = []
        self._links = links

    def send(self, tensor: Tensor, *, destination: int) -> Work:
        self.sent.append((destination, tensor.nbytes))
        link = self._links[self.rank, destination]
        return self._keep(link.post(link.sent, tensor))

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        link = self._links[source, self.rank]
        return self._keep(link.post(link.awaited, tensor))

    def _keep(self, work: Work) -> Work:
        self.posted.append(work)
        return work


def in_threads(size: int, work: Callable[[Collective], None]) -> list[Rank]:
    """`work` on every rank of a world of threads."""
    links = {(a, b): Link() for a in range(size) for b in range(size) if a != b}
    ranks = [Rank(rank, size, links) for rank in range(size)]
    errors: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            work(cast(Collective, rank))
            assert all(parcel.poll() for parcel in rank.posted), "returned with messages under way"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert not any(link.sent or link.awaited for link in links.values()), "one side of a message was left"
    return ranks


def all_reduce_in_threads(name: str, tensors: list[Tensor], op: SumOrMean = "mean") -> list[Rank]:
    return in_threads(len(tensors), lambda rank: ALGORITHMS[name](rank, tensors[rank.rank], op=op))


def values(rank: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(num_elements, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return drawn.abs().mul(20).to(dtype) if dtype == torch.uint8 else drawn.mul(20).to(dtype)


def reduced(inputs: list[Tensor], op: SumOrMean) -> Tensor:
    """In float64 where that is exact enough to compare with, else in the dtype itself."""
    total = sum((tensor.double() if tensor.dtype in FLOATS else tensor.clone()) for tensor in inputs)
    assert isinstance(total, Tensor)
    if op == "sum":
        return total
    is_integer = not total.is_floating_point() and not total.is_complex()
    return total.div(len(inputs), rounding_mode="trunc") if is_integer else total / len(inputs)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 9),
    num_elements=st.one_of(st.integers(0, 12), st.integers(13, 300)),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(get_args(SumOrMean)),
)
def test_the_reduction_of_all_ranks_on_every_rank(
    name: str, size: int, num_elements: int, dtype: torch.dtype, op: SumOrMean
) -> None:
    inputs = [values(rank, num_elements, dtype) for rank in range(size)]
    tensors = [tensor.clone() for tensor in inputs]
    all_reduce_in_threads(name, tensors, op)
    # Partial sums are up to size times as large as an addend, and rounded up to size times.
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 1e-15}.get(dtype, 1e-6) * size
    expected = reduced(inputs, op).to(torch.float64 if dtype in FLOATS else dtype)
    found = tensors[0].to(expected.dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=60 * size * tolerance)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), "bits differ between ranks"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_large_tensors_travel_in_pieces(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PIECE_BYTES", 4096)
    num_elements = size * 4 * 1024 + 17
    inputs = [values(rank, num_elements, torch.float32) for rank in range(size)]
    tensors = [tensor.clone() for tensor in inputs]
    ranks = all_reduce_in_threads(name, tensors)
    torch.testing.assert_close(tensors[0], reduced(inputs, "mean").float(), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), "bits differ between ranks"
    assert max(num_bytes for rank in ranks for _, num_bytes in rank.sent) == 4096


@pytest.mark.parametrize("name", ["reduce-broadcast", "all-to-all", "naive-ring"])
def test_half_precision_is_accumulated_in_float32(name: str) -> None:
    """257 ones in a row: in bfloat16 a sum of ones stays at 256, in float16 one of 40000s overflows."""
    for dtype, value, size in ((torch.bfloat16, 128.0, 9), (torch.float16, 40000.0, 3)):
        tensors = [torch.full((5,), 1.0 if rank else value, dtype=dtype) for rank in range(size)]
        if dtype == torch.float16:
            tensors = [torch.full((5,), value, dtype=dtype) for _ in range(size)]
        expected = torch.stack(tensors).float().mean(0).to(dtype)
        all_reduce_in_threads(name, tensors)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize("name", ["ring", "tree", "halving-doubling"])
def test_a_mean_of_two_halves_does_not_overflow(name: str) -> None:
    """The last addition and the division happen in float32; rounded between them, 80000 would be infinite."""
    tensors = [torch.full((9,), 40000.0, dtype=torch.float16) for _ in range(2)]
    all_reduce_in_threads(name, tensors)
    assert tensors[0].tolist() == tensors[1].tolist() == [40000.0] * 9


# --- what each algorithm sends, as its docstring says ----------------------------------------------------------------

NUM_ELEMENTS = 5040  # 9 and all that is less divide it


def bytes_sent(name: str, size: int) -> list[float]:
    """By each rank, in multiples of the tensor."""
    ranks = all_reduce_in_threads(name, [torch.ones(NUM_ELEMENTS, dtype=torch.float64) for _ in range(size)])
    return [sum(count for _, count in rank.sent) / (8 * NUM_ELEMENTS) for rank in ranks]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["ring", "all-to-all"])
def test_the_least_that_has_to_be_sent(name: str, size: int) -> None:
    assert bytes_sent(name, size) == pytest.approx([2 * (size - 1) / size] * size)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_halving_and_doubling_sends_as_little_in_few_rounds(size: int) -> None:
    assert bytes_sent("halving-doubling", size) == pytest.approx([2 * (size - 1) / size] * size)
    ranks = all_reduce_in_threads("halving-doubling", [torch.ones(64) for _ in range(size)])
    assert {len(rank.sent) for rank in ranks} == {2 * int(math.log2(size))}


def test_ranks_beyond_a_power_of_two_cost_one_tensor_more() -> None:
    assert bytes_sent("halving-doubling", 6) == pytest.approx([2.5, 2.5, 1.5, 1.5, 1, 1])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_reduce_broadcast_loads_rank_0(size: int) -> None:
    assert bytes_sent("reduce-broadcast", size) == [size - 1] + [1] * (size - 1)


@pytest.mark.parametrize("size", range(2, 34))
def test_the_two_trees(size: int) -> None:
    """Both span all ranks in about log2(n) levels, and nobody but rank 0 of an odd number is inner in both."""
    places = [_places(rank, size) for rank in range(size)]
    for tree in (0, 1):
        roots = [rank for rank in range(size) if places[rank][tree].parent is None]
        level, depth = roots, 0
        reached = list(roots)
        while level := [child for rank in level for child in places[rank][tree].children]:
            assert all(places[child][tree].parent in reached for child in level)
            reached += level
            depth += 1
        assert len(roots) == 1
        assert sorted(reached) == list(range(size))
        assert depth <= math.ceil(math.log2(size)) + 1
    inner = [sum(bool(place.children) for place in pair) for pair in places]
    assert inner[1:] == [1] * (size - 1) if size % 2 == 0 else max(inner[1:]) <= 1
    children = [sum(len(place.children) for place in pair) for pair in places]
    assert max(children) <= 2 + size % 2
    # Messages of both trees that go the same way between two ranks would have to be told apart by their order.
    assert size == 3 or not any(first.parent is not None and first.parent == second.parent for first, second in places)


def test_a_tree_sends_what_its_docstring_says() -> None:
    assert max(bytes_sent("tree", 8)) <= 2
    sent = bytes_sent("tree", 7)
    assert max(sent[1:]) <= 2
    assert sent[0] <= 2.5


@pytest.mark.parametrize(("name", "num_rounds"), [("ring", 2 * 4), ("naive-ring", 4)])
def test_rings_send_to_the_next_rank_only(name: str, num_rounds: int) -> None:
    ranks = all_reduce_in_threads(name, [torch.ones(50) for _ in range(5)])
    for rank in ranks:
        assert {destination for destination, _ in rank.sent} == {(rank.rank + 1) % 5}
        assert len(rank.sent) == num_rounds


@pytest.mark.parametrize("size", [2, 5])
def test_the_naive_ring_sends_whole_tensors(size: int) -> None:
    assert bytes_sent("naive-ring", size) == [size - 1] * size


# --- arguments, and the work --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_world_of_one_keeps_its_tensor(name: str) -> None:
    tensor = torch.arange(3.0, requires_grad=True)
    ALGORITHMS[name](AloneCollective(), tensor)
    assert tensor.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_reduced_is_refused(name: str) -> None:
    alone = AloneCollective()
    with pytest.raises(RuntimeError, match="view"):
        ALGORITHMS[name](alone, torch.zeros(4, 4).t()[:, :2])
    with pytest.raises(TypeError, match="mean of bool"):
        ALGORITHMS[name](alone, torch.zeros(4, dtype=torch.bool))
    with pytest.raises(UsageError, match="avg"):
        ALGORITHMS[name](alone, torch.zeros(4), op=cast(SumOrMean, "avg"))


def test_the_work_runs_once_when_it_is_waited_for() -> None:
    tensors = [torch.full((3,), float(rank)) for rank in range(2)]
    works: list[AlgorithmWork] = []

    def run(rank: Collective) -> None:
        work = AlgorithmWork(rank, ALGORITHMS["ring"], tensors[rank.rank])
        assert not work.poll()
        work.wait()
        assert work.poll()
        works.append(work)

    ranks = in_threads(2, run)
    num_sent = len(ranks[0].sent)
    for work in works:
        work.wait()
    assert len(ranks[0].sent) == num_sent
    assert [tensor.tolist() for tensor in tensors] == [[0.5] * 3] * 2


def test_the_strategy_knows_every_algorithm() -> None:
    assert get_args(Algorithm) == ("auto", *ALGORITHMS)
    with pytest.raises(UsageError, match=r"halving-doubling.*not 'halving-dubling'"):
        AllReduce(algorithm=cast(Algorithm, "halving-dubling"))


# --- real processes -------------------------------------------------------------------------------------------------

LENGTHS = (1, 3, 1001, 300_007)


def average(collective: Collective, name: str, num_elements: int, dtype: torch.dtype, allocated: bool) -> Tensor:
    """On a rank: over a tensor of its own, or in memory from the collective."""
    tensor = values(collective.rank, num_elements, dtype)
    if allocated:
        tensor = collective.allocate(tensor.nbytes).view(dtype).copy_(tensor)
    AlgorithmWork(collective, ALGORITHMS[name], tensor).wait()
    return tensor.clone()


def two_at_once(collective: Collective, name: str) -> list[Any]:
    """Two that are started together and waited for in order, as buckets are, and a collective between."""
    first, second = torch.full((5000,), float(collective.rank)), torch.full((3,), 10.0 * collective.rank)
    works = [AlgorithmWork(collective, ALGORITHMS[name], tensor) for tensor in (first, second)]
    for work in works:
        work.poll()
    collective.barrier()
    for work in works:
        work.wait()
    return [first.unique().tolist(), second.unique().tolist()]


def until_error(collective: Collective, name: str) -> tuple[str, str, float]:
    tensor = torch.zeros(300_000)

    def work() -> None:
        while True:
            ALGORITHMS[name](collective, tensor)

    return caught(work)


@pytest.fixture(scope="module", params=[("shared_memory", 3), ("shared_memory", 4), ("gloo", 3)], ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(*request.param) as opened:
        yield opened


@pytest.mark.parametrize("name", NAMES)
def test_processes_agree_on_the_mean(world: World, name: str) -> None:
    for num_elements in LENGTHS:
        for dtype, allocated in ((torch.float32, False), (torch.bfloat16, True)):
            found = world.run(average, name, num_elements, dtype, allocated)
            inputs = [values(rank, num_elements, dtype) for rank in range(world.size)]
            tolerance = 1e-5 if dtype == torch.float32 else 2**-6
            expected = reduced(inputs, "mean").to(dtype)
            torch.testing.assert_close(found[0], expected, rtol=tolerance, atol=60 * tolerance)
            assert all(torch.equal(other, found[0]) for other in found), "bits differ between ranks"


@pytest.mark.parametrize("name", NAMES)
def test_they_wait_for_each_other_in_order(world: World, name: str) -> None:
    mean = (world.size - 1) / 2
    assert world.run(two_at_once, name) == [[[mean], [10 * mean]]] * world.size


@pytest.mark.parametrize("name", NAMES)
def test_survivors_of_a_killed_rank_raise(name: str) -> None:
    with World("shared_memory", 3, deadline_s=40.0) as world:
        world.run(Collective.barrier)
        world.start(until_error, name)
        threading.Event().wait(0.1)
        killed_at = world.kill(2)
        for rank in (0, 1):
            kind, message, at = world.result(rank)
            assert kind == "PeerLost", message
            assert "rank" in message
            assert at - killed_at < 20.0  # half of the deadline


def test_they_are_refused_where_ranks_cannot_receive_first() -> None:
    collective = AloneCollective()
    collective.can_receive_first = False
    context = Context(0, Membership.first(1), 0, 1, torch.device("cpu"), collective)
    replica: Any = SimpleNamespace(optimizer=torch.optim.SGD([torch.zeros(1)]))
    with pytest.raises(UsageError, match="not for NCCL"):
        AllReduce(algorithm="ring").bind(context, replica)
