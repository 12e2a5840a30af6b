"""The hierarchical collective on simulated hosts: every operation against a flat gloo group's, and every failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.buckets import Bucket
from paceline.codec import Codec, Int8, PowerSGD, RandomK, TopK
from paceline.comm.base import REDUCE_OPS, Collective, ReduceOp
from paceline.comm.hierarchical.collective import HierarchicalCollective
from paceline.errors import UsageError
from paceline.layout import TensorSpec, in_buckets
from paceline.strategies.coding import Coding
from paceline.strategies.exchange import Exchange
from tests.covering import in_turns
from tests.unit.collective_harness import MEETING_S, World, caught, later, wait_for
from tests.unit.many_works import run_many, sums_of_many

Hosts = tuple[tuple[int, ...], ...]
LAYOUTS: tuple[Hosts, ...] = (((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2), (3, 4)))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8)
LATE_S = 2.5  # so long that no delay of a busy machine comes near it
LENGTHS = (0, 1, 5, 1000, 16_385, 70_001)

_opened: list[HierarchicalCollective] = []  # of one of the processes


def open_hierarchical(world: Collective, path: str, hosts: Hosts, deadline_s: float) -> None:
    store = dist.FileStore(path, world.size)
    collective = HierarchicalCollective(store, rank=world.rank, hosts=hosts, address="127.0.0.1", deadline_s=MEETING_S)
    collective.set_deadline(deadline_s)
    _opened.append(collective)


def on_hierarchical(world: Collective, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(_opened[-1], *arguments)


def both(world: Collective, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """What a function finds on the hierarchical collective and on the flat one."""
    return function(_opened[-1], *arguments), function(world, *arguments)


class Hierarchy:
    """Processes that have both a flat gloo group and a hierarchical collective."""

    numbers = count()

    def __init__(self, hosts: Hosts, directory: Path, *, deadline_s: float = MEETING_S) -> None:
        self.hosts = hosts
        self.size = sum(map(len, hosts))
        self.world = World("gloo", self.size, deadline_s=deadline_s)
        path = directory / f"store-{next(self.numbers)}"
        self.world.run(open_hierarchical, str(path), hosts, deadline_s)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.world.run(on_hierarchical, function, *arguments)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.world.start(on_hierarchical, function, *arguments)

    def compare(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[Any, Any]]:
        return self.world.run(both, function, *arguments)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda hosts: "+".join(str(len(host)) for host in hosts))
def hierarchy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hierarchy]:
    opened = Hierarchy(request.param, tmp_path_factory.mktemp("stores"))
    with opened.world:
        yield opened


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Hierarchy]:
    """Two hosts with two ranks each, for a test that ends them."""
    opened = Hierarchy(LAYOUTS[0], tmp_path, deadline_s=40.0)
    with opened.world:
        yield opened


def values(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64).mul(3)
    return drawn.abs().to(dtype) if dtype == torch.uint8 else drawn.to(dtype)


# ---- against the flat group --------------------------------------------------------------------------------------


def run_all_reduce(collective: Collective, length: int, dtype: torch.dtype, op: ReduceOp, place: str) -> Tensor:
    tensor = values(collective.rank, (length,), dtype)
    if place == "allocated" and length:
        tensor = collective.allocate(tensor.nbytes + 64)[64:].view(dtype).copy_(tensor)
    if place == "strided":
        tensor = torch.stack([tensor, tensor], dim=1)[:, 1]
    collective.all_reduce(tensor, op=op).wait()
    return tensor.clone()


def test_all_reduce(hierarchy: Hierarchy) -> None:
    @settings(max_examples=15, deadline=None, database=None)
    @given(
        length=st.sampled_from(LENGTHS),
        dtype=st.sampled_from(DTYPES),
        op=st.sampled_from(REDUCE_OPS),
        place=st.sampled_from(["allocated", "allocated", "plain", "strided"]),
    )
    def test(length: int, dtype: torch.dtype, op: ReduceOp, place: str) -> None:
        results = hierarchy.compare(run_all_reduce, length, dtype, op, place)
        flat = results[0][1]
        for found, _ in results:
            if dtype.is_floating_point:
                torch.testing.assert_close(found, flat)  # in another order
            else:
                assert torch.equal(found, flat)
            assert torch.equal(found, results[0][0]), "bits differ between ranks"

    test()


def test_half_precision_is_accumulated_in_float32(hierarchy: Hierarchy) -> None:
    for length in (3, 70_001):
        assert hierarchy.run(run_large_halves, length) == [[40_000.0]] * hierarchy.size


def run_large_halves(collective: Collective, length: int) -> list[float]:
    tensor = collective.allocate(2 * length).view(torch.float16).fill_(40_000)
    collective.all_reduce(tensor, op="mean").wait()
    return tensor.unique().tolist()


def run_broadcast(collective: Collective, root: int) -> Tensor:
    tensor = values(collective.rank, (300, 7), torch.float32)
    collective.broadcast(tensor, root=root)
    return tensor


def run_all_gather(collective: Collective) -> list[Tensor]:
    return collective.all_gather(values(collective.rank, (collective.rank, 5), torch.int64))


def run_gather(collective: Collective, root: int) -> list[Tensor] | None:
    return collective.gather(values(collective.rank, (collective.rank + 1,), torch.float32), root=root)


def run_scatter(collective: Collective, root: int) -> Tensor:
    tensors = [values(rank, (rank, 2), torch.float32) for rank in range(collective.size)]
    return collective.scatter(tensors if collective.rank == root else None, root=root)


def run_reduce_scatter(collective: Collective, op: ReduceOp) -> Tensor:
    rank = collective.rank
    tensors = [values(100 * rank + other, (other, 3), torch.float32) for other in range(collective.size)]
    return collective.reduce_scatter(tensors, op=op)


def run_all_to_all(collective: Collective) -> list[Tensor]:
    rank = collective.rank
    return collective.all_to_all([values(rank, (rank + other,), torch.float64) for other in range(collective.size)])


def run_messages(collective: Collective, num_elements: int) -> list[Tensor]:
    """To everyone and from everyone, on the same host and on others, all at once."""
    others = [rank for rank in range(collective.size) if rank != collective.rank]
    mine = values(collective.rank, (num_elements,), torch.float32)
    sending = [collective.send(mine, destination=other) for other in others]
    theirs = [torch.empty(num_elements) for _ in others]
    receiving = [collective.recv(tensor, source=other) for tensor, other in zip(theirs, others, strict=True)]
    for work in [*receiving, *sending]:
        work.wait()
        assert work.poll()
    return theirs


def run_objects(collective: Collective) -> list[Any]:
    value = {"rank": collective.rank}
    return [collective.all_gather_object(value), collective.broadcast_object(value, root=collective.size - 1)]


OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "broadcast": (run_broadcast, (1,)),
    "broadcast from the last": (run_broadcast, (3,)),
    "all_gather": (run_all_gather, ()),
    "gather": (run_gather, (2,)),
    "scatter": (run_scatter, (3,)),
    "reduce_scatter": (run_reduce_scatter, ("mean",)),
    "all_to_all": (run_all_to_all, ()),
    "messages": (run_messages, (1000,)),
    "large messages": (run_messages, (600_000,)),
    "objects": (run_objects, ()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_operations(hierarchy: Hierarchy, name: str) -> None:
    function, arguments = OPERATIONS[name]
    for found, flat in hierarchy.compare(function, *arguments):
        torch.testing.assert_close(found, flat, rtol=0, atol=0) if found is not None else None
        assert (found is None) == (flat is None)


def test_a_barrier_waits_for_the_last(hierarchy: Hierarchy, tmp_path: Path) -> None:
    assert all(hierarchy.run(run_barrier, tmp_path / "last-has-come"))


def run_barrier(collective: Collective, last_has_come: Path) -> bool:
    collective.barrier()
    if collective.rank == collective.size - 1:
        time.sleep(0.25)
        last_has_come.touch()
    collective.barrier()
    return last_has_come.exists()


# ---- many works under way ----------------------------------------------------------------------------------------


def by_turns(things: Sequence[Any]) -> pytest.MarkDecorator:
    """Each on one layout of ranks, and the next one on the next."""
    return pytest.mark.parametrize(
        ("hierarchy", "thing"), in_turns(things, LAYOUTS, are_quick=True), indirect=["hierarchy"], ids=str
    )


@by_turns(["wait", "backwards", "poll", "barrier"])
def test_many_works_under_way(hierarchy: Hierarchy, thing: str) -> None:
    assert hierarchy.run(run_many, thing) == [sums_of_many(hierarchy.size)] * hierarchy.size


def test_more_small_works_than_slots(hierarchy: Hierarchy) -> None:
    expected = [float(hierarchy.size * number + sum(range(hierarchy.size))) for number in range(200)]
    assert hierarchy.run(run_many_small, 200) == [expected] * hierarchy.size


def run_many_small(collective: Collective, num_works: int) -> list[float]:
    tensors = [torch.full((5,), float(number + collective.rank)) for number in range(num_works)]
    for work in [collective.all_reduce(tensor) for tensor in tensors]:
        work.wait()
    return [float(tensor[4]) for tensor in tensors]


def test_the_same_memory_again_and_again(hierarchy: Hierarchy) -> None:
    """As gradients are: overwritten as soon as the work is over, while others may still be at it."""
    assert all(hierarchy.run(run_again))


def run_again(collective: Collective) -> bool:
    tensor = collective.allocate(4 * 50_000).view(torch.float32)
    small = torch.empty(10)
    for step in range(100):
        works = [collective.all_reduce(tensor.fill_(step + collective.rank)), collective.all_reduce(small.fill_(step))]
        for work in works:
            work.wait()
        total = collective.size * step
        if not (tensor.eq(total + sum(range(collective.size))).all() and small.eq(total).all()):
            return False
    return True


def test_time_and_bytes_are_summed(hierarchy: Hierarchy) -> None:
    for rank, (waited_s, communicated_s, moved_bytes) in enumerate(hierarchy.run(run_timed)):
        is_late = rank == hierarchy.size - 1
        # A rank waits for its host in shared memory, for other hosts in gloo, whose waits count as communication.
        assert waited_s + communicated_s > LATE_S / 4 or is_late
        assert communicated_s > 0
        assert moved_bytes >= 4_000_000 / max(map(len, hierarchy.hosts))


def run_timed(collective: Collective) -> tuple[float, float, int]:
    memory = collective.allocate(4_000_000).view(torch.float32)
    collective.barrier()
    timing = collective.timing
    before = (timing.waiting_s, timing.communication_s, timing.moved_bytes)
    if collective.rank == collective.size - 1:
        time.sleep(LATE_S)
    collective.all_reduce(memory).wait()
    return timing.waiting_s - before[0], timing.communication_s - before[1], timing.moved_bytes - before[2]


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_refusals_leave_the_collective_usable(hierarchy: Hierarchy) -> None:
    for refusals in hierarchy.run(run_refusals):
        assert [name for name, _, _ in refusals] == [
            "TypeError", "TypeError", "UsageError", "UsageError", "UsageError", "ValueError", "TensorMismatch",
        ]  # fmt: skip


def run_refusals(collective: Collective) -> list[tuple[str, str, float]]:
    refusals = [
        caught(lambda: collective.all_reduce(torch.ones(3, dtype=torch.uint16))),
        caught(lambda: collective.all_reduce(torch.ones(3, dtype=torch.complex64), op="product")),
        caught(lambda: collective.broadcast(torch.ones(1), root=9)),
        caught(lambda: collective.send(torch.ones(1), destination=collective.rank)),
        caught(lambda: collective.all_to_all([])),
        caught(lambda: collective.allocate(0)),
        caught(lambda: collective.allocate(64 + collective.rank)),
    ]
    collective.barrier()
    return refusals


def test_hosts_that_do_not_hold_every_rank_once() -> None:
    for hosts in (((0, 1), (1, 2)), ((0,), (2,)), ()):
        with pytest.raises(UsageError, match="hosts must hold each of ranks"):
            HierarchicalCollective(dist.HashStore(), rank=0, hosts=hosts, address="127.0.0.1")


# ---- failures ----------------------------------------------------------------------------------------------------


def work_until_error(collective: Collective, num_elements: int) -> tuple[str, str, float]:
    memory = collective.allocate(4 * num_elements).view(torch.float32)

    def work() -> None:
        while True:
            collective.all_reduce(memory).wait()

    return caught(work)


@pytest.mark.parametrize(("victim", "num_elements"), [(3, 300_000), (0, 300_000), (2, 10)])
def test_survivors_of_a_killed_rank_raise(pairs: Hierarchy, victim: int, num_elements: int) -> None:
    pairs.start(work_until_error, num_elements)
    time.sleep(0.5)
    killed_at = pairs.world.kill(victim)
    for rank in {0, 1, 2, 3} - {victim}:
        name, message, at = pairs.world.result(rank)
        assert name == "PeerLost", message
        assert f"rank {victim} is lost" in message
        assert at - killed_at < 20.0  # half of the deadline


def test_a_deadline_names_who_is_missing(tmp_path: Path) -> None:
    hasty = Hierarchy(LAYOUTS[0], tmp_path, deadline_s=4.0)
    with hasty.world:
        results = hasty.run(run_late)
    kind, message, _ = results[2]
    assert kind == "DeadlineExceeded"
    assert "rank 3 has not taken part in all_reduce(sum)" in message
    for kind, message, _ in results[:2]:
        assert kind in ("DeadlineExceeded", "PeerLost")
        assert "rank" in message


def run_late(collective: Collective) -> tuple[str, str, float]:
    memory = collective.allocate(4 * 300_000).view(torch.float32)
    if collective.rank == 3:
        return "", "", 0.0
    return caught(lambda: collective.all_reduce(memory).wait())


def test_abort_from_another_thread(pairs: Hierarchy, tmp_path: Path) -> None:
    results = pairs.run(run_aborted, tmp_path / "is-over")
    for name, message, _ in results[0]:
        assert name == "Aborted"
        assert "the run is over" in message
    kind, message, _ = results[1][0]
    assert kind == "PeerLost", message
    assert "rank 0" in message
    assert "the run is over" in message


def run_aborted(collective: Collective, is_over: Path) -> list[Any]:
    """Rank 3 comes only once rank 0 has stopped waiting for it."""
    collective.barrier()
    if collective.rank == 0:
        later(0.2, collective.abort, "the run is over")
    if collective.rank == 3:
        wait_for(is_over)
    errors = [caught(lambda: collective.all_reduce(torch.ones(3)).wait()), caught(collective.barrier)]
    if collective.rank == 0:
        is_over.touch()
    return errors


def test_ranks_of_a_host_that_disagree_find_out(pairs: Hierarchy) -> None:
    results = pairs.run(run_disagreement)
    for kind, message, _ in results[2:]:
        assert kind == "CallMismatch", message
        assert "rank 2 asks for all_reduce(sum) of 3 elements" in message
        assert "rank 3 for all_reduce(sum) of 4 elements" in message


def run_disagreement(collective: Collective) -> tuple[str, str, float]:
    collective.barrier()
    return caught(lambda: collective.all_reduce(torch.ones(4 if collective.rank == 3 else 3)).wait())


def test_close_ends_it(pairs: Hierarchy) -> None:
    assert pairs.run(run_and_close) == [("UsageError", 7.0)] * 4


def run_and_close(collective: Collective) -> tuple[str, float]:
    tensor = collective.allocate(400).view(torch.float32).fill_(7)
    collective.barrier()
    collective.close()
    collective.close()
    return caught(collective.barrier)[0], float(tensor[99])


# --- codecs ----------------------------------------------------------------------------------------------------------


def coded_rounds(collective: Collective, codec: Codec, num_rounds: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Means of what each round gave, what this rank keeps, and the bytes that it has moved."""
    layout = in_buckets([TensorSpec(f"{n}", (60, 50), torch.float32) for n in range(4)], bucket_bytes=20_000)
    buffer = collective.allocate(layout.num_bytes)
    flats = [segment.view(buffer) for segment in layout.segments]
    cuts = [flat.numel() - segment.tail for flat, segment in zip(flats, layout.segments, strict=True)]
    buckets = [Bucket(flat, flat[:cut], flat[cut:]) for flat, cut in zip(flats, cuts, strict=True)]
    exchange = Exchange(collective, buckets, coding=Coding(codec, among_hosts=True), layout=layout)
    means, before = [], collective.timing.moved_bytes
    for number in range(num_rounds):
        for bucket, segment in zip(buckets, layout.segments, strict=True):
            bucket.values.normal_(generator=torch.Generator().manual_seed(100 * collective.rank + number))
            bucket.flags.fill_(float(collective.rank))
            segment.zero_padding(bucket.values)
            bucket.flags[0] = 0.0
        for work in [exchange.start(index, step=number) for index in range(len(buckets))]:
            work.wait()
        exchange.settle(is_applied=True)
        assert all(float(bucket.flags[1]) == (collective.size - 1) / 2 for bucket in buckets)
        means.append(torch.cat([bucket.values for bucket in buckets]))
    kept = [state.tensor for state in exchange.own_state().values()]
    return means, kept, collective.timing.moved_bytes - before


@by_turns([Int8(), TopK(ratio=0.1), PowerSGD(start=0), RandomK()])
def test_hosts_join_theirs_before_anything_is_coded(hierarchy: Hierarchy, thing: Codec) -> None:
    """Several buckets at once, through the hosts: all ranks have the same mean, which is near what it should be."""
    codec, rounds = thing, 12
    answers = hierarchy.run(coded_rounds, codec, rounds)
    for means, _, _ in answers[1:]:
        assert all(torch.equal(*pair) for pair in zip(means, answers[0][0], strict=True))
    exact = hierarchy.run(coded_rounds, Int8(size=1), rounds)[0][0]  # a scale for each element
    error = torch.stack(answers[0][0]).sum(0) - torch.stack(exact).sum(0)
    assert float(error.norm()) < (6 if codec.unbiased else 3.5) * float(torch.stack(exact).sum(0).norm())
    if isinstance(codec, Int8):
        assert float(error.norm()) < 0.01 * float(torch.stack(exact).sum(0).norm())
