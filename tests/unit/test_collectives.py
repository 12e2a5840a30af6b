"""Every operation of every collective against a naive twin, and every way in which a peer can fail."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm import futex
from paceline.comm.alone import AloneCollective
from paceline.comm.base import REDUCE_OPS, Collective, ReduceOp
from paceline.comm.segment import Segment
from paceline.comm.shared_memory import SharedMemoryCollective
from paceline.comm.torch_distributed import connect_gloo
from paceline.errors import Aborted, DeadlineExceeded, PeerLost, UsageError
from tests.unit.collective_harness import World, caught, later, mapped_files, open_descriptors

Call = Callable[[Collective], Any]
SLOT_ELEMENTS = 2**20 // 4  # float32 in one staging slot
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MOVABLE = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn)

WORLDS = [("alone", 1), ("shared_memory", 2), ("shared_memory", 3), ("shared_memory", 5), ("gloo", 2), ("gloo", 3)]
EXAMPLES = {("shared_memory", 2): 30, ("shared_memory", 3): 20, ("shared_memory", 5): 5}


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    backend, size = request.param
    with World(backend, size) as world:
        yield world


@pytest.fixture
def trio() -> Iterator[World]:
    with World("shared_memory", 3) as world:
        yield world


@dataclass(frozen=True)
class Spec:
    """A tensor that every process can make for every rank."""

    seed: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "contiguous"

    def make(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        raw = torch.randint(-6, 7, self.shape, generator=generator)
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            values = (raw + torch.rand(self.shape, generator=generator)).to(self.dtype)
        else:
            values = raw.to(self.dtype)
        if self.layout == "transposed":
            return values.mT.contiguous().mT if values.dim() > 1 else values
        if self.layout == "strided":
            holder = torch.zeros(*self.shape, 2, dtype=self.dtype)
            holder[..., 1] = values
            return holder[..., 1]
        return values


def specs(dtypes: Sequence[torch.dtype], *, large: bool = True) -> st.SearchStrategy[Spec]:
    small = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    big = st.sampled_from([(16384,), (16385,), (3, 7001), (70001,), (SLOT_ELEMENTS + 17,), (2 * SLOT_ELEMENTS + 1,)])
    return st.builds(
        Spec,
        st.integers(0, 999),
        st.sampled_from(dtypes),
        st.one_of(small, small, big) if large else small,
        st.sampled_from(["contiguous", "transposed", "strided"]),
    )


def examples(world: World) -> int:
    return EXAMPLES.get((world.backend, world.size), 10)


def check(world: World, strategy: st.SearchStrategy[Any], test: Any) -> None:
    """Run `test(example)` for examples of the strategy, as many as this world is worth."""
    settings(max_examples=examples(world), deadline=None, database=None)(given(strategy)(test))()


# ---- naive twins -------------------------------------------------------------------------------------------------


def reduce_naively(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """One rank after the other, the whole tensor at a time."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        other = part.to(wide)
        if op in ("sum", "mean"):
            total = total + other
        elif op == "product":
            total = total * other
        else:
            total = torch.minimum(total, other) if op == "min" else torch.maximum(total, other)
    if op == "mean":
        total = total / len(parts) if wide.is_floating_point else total.div(len(parts), rounding_mode="trunc")
    return total.to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bytes_of(one) == bytes_of(other)


def bytes_of(tensor: Tensor) -> bytes:
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return packed.view(torch.uint8).numpy().tobytes()


def require_same(world: World, got: Tensor, expected: Tensor) -> None:
    if world.backend == "gloo" and got.dtype.is_floating_point:
        torch.testing.assert_close(got, expected)  # gloo adds in another order
    else:
        assert same_bits(got, expected)


# ---- what ranks run ----------------------------------------------------------------------------------------------


def run_all_reduce(collective: Collective, spec: Spec, op: ReduceOp, allocated: bool) -> Tensor:
    tensor = spec.make(collective.rank)
    if allocated and tensor.numel():
        memory = collective.allocate(tensor.nbytes + 64)[64:].view(tensor.dtype).view(tensor.shape)
        tensor = memory.copy_(tensor)
    strides = tensor.stride()
    collective.all_reduce(tensor, op=op).wait()
    assert tensor.stride() == strides
    return tensor.clone()


def run_broadcast(collective: Collective, spec: Spec, root: int) -> Tensor:
    tensor = spec.make(collective.rank)
    collective.broadcast(tensor, root=root)
    return tensor


def run_all_gather(collective: Collective, each: Sequence[Spec]) -> list[Tensor]:
    return collective.all_gather(each[collective.rank].make(collective.rank))


def run_all_to_all(collective: Collective, table: Sequence[Sequence[Spec]]) -> list[Tensor]:
    mine = [spec.make(100 * collective.rank + other) for other, spec in enumerate(table[collective.rank])]
    return collective.all_to_all(mine)


def run_reduce_scatter(collective: Collective, row: Sequence[Spec], op: ReduceOp) -> Tensor:
    mine = [spec.make(100 * collective.rank + other) for other, spec in enumerate(row)]
    return collective.reduce_scatter(mine, op=op)


def run_ring(collective: Collective, each: Sequence[Spec]) -> Tensor:
    """Send to the next rank while receiving from the one before."""
    rank, size = collective.rank, collective.size
    sending = collective.send(each[rank].make(rank), destination=(rank + 1) % size)
    source = (rank - 1) % size
    incoming = torch.zeros_like(each[source].make(source))
    collective.recv(incoming, source=source)
    sending.wait()
    assert sending.poll()
    return incoming


def run_objects(collective: Collective) -> tuple[list[Any], Any]:
    value = {"rank": collective.rank, "shape": [1] * collective.rank}
    gathered = collective.all_gather_object(value)
    collective.require_equal("setting", "the same")
    return gathered, collective.broadcast_object(value, root=collective.size - 1)


# ---- agreement with the twins ------------------------------------------------------------------------------------


def test_all_reduce(world: World) -> None:
    reducible = st.one_of(
        st.tuples(specs((*FLOATS, *INTEGERS)), st.sampled_from(REDUCE_OPS), st.booleans()),
        st.tuples(specs((torch.bool,)), st.sampled_from([op for op in REDUCE_OPS if op != "mean"]), st.booleans()),
    )

    def test(example: tuple[Spec, ReduceOp, bool]) -> None:
        spec, op, allocated = example
        expected = reduce_naively([spec.make(rank) for rank in range(world.size)], op)
        results = world.run(run_all_reduce, spec, op, allocated)
        for result in results:
            require_same(world, result, expected)
            assert same_bits(result, results[0])

    check(world, reducible, test)


def test_mean_of_integers_truncates_towards_zero(world: World) -> None:
    results = world.run(run_minus_three)
    assert all(result.tolist() == [-3, int(-(2 * world.size + 1) / world.size)] for result in results)


def run_minus_three(collective: Collective) -> Tensor:
    tensor = torch.tensor([-3, -3 if collective.rank == 0 else -2])
    collective.all_reduce(tensor, op="mean").wait()
    return tensor


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


def test_reduce_scatter(world: World) -> None:
    def test(example: tuple[list[Spec], ReduceOp]) -> None:
        row, op = example
        for rank, result in enumerate(world.run(run_reduce_scatter, row, op)):
            expected = reduce_naively([row[rank].make(100 * other + rank) for other in range(world.size)], op)
            assert same_bits(result, expected)

    rows = st.sampled_from((*FLOATS, *INTEGERS)).flatmap(lambda dtype: one_each(world.size, dtype))
    check(world, st.tuples(rows, st.sampled_from(REDUCE_OPS)), test)


def test_send_and_recv_around_a_ring(world: World) -> None:
    if world.size == 1:
        pytest.skip("there is nobody to send to")

    def test(each: list[Spec]) -> None:
        for rank, result in enumerate(world.run(run_ring, each)):
            source = (rank - 1) % world.size
            assert same_bits(result, each[source].make(source))

    check(world, st.sampled_from(MOVABLE).flatmap(lambda dtype: one_each(world.size, dtype)), test)


def one_each(size: int, dtype: torch.dtype) -> st.SearchStrategy[list[Spec]]:
    return st.lists(specs((dtype,)), min_size=size, max_size=size)


def test_objects(world: World) -> None:
    expected = [{"rank": rank, "shape": [1] * rank} for rank in range(world.size)]
    for gathered, from_last in world.run(run_objects):
        assert gathered == expected
        assert from_last == expected[-1]


# ---- many works under way ----------------------------------------------------------------------------------------


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


def test_more_works_than_signatures_are_kept(trio: World) -> None:
    assert all(trio.run(run_300_allocated))


def run_300_allocated(collective: Collective) -> bool:
    rows = collective.allocate(300 * 80_000).view(torch.float32).view(300, 20_000).fill_(collective.rank)
    for work in [collective.all_reduce(row) for row in rows]:
        work.wait()
    return bool(rows.eq(3).all())


def test_a_send_under_way_does_not_hold_up_collectives(trio: World) -> None:
    assert trio.run(run_send_across_all_reduce) == [True] * 3


def run_send_across_all_reduce(collective: Collective) -> bool:
    big = torch.full((500_000,), float(collective.rank))
    incoming = torch.zeros_like(big)
    if collective.rank == 0:
        sending = collective.send(big, destination=1)
        flags = torch.ones(3)
        collective.all_reduce(flags).wait()
        sending.wait()
    else:
        if collective.rank == 1:
            collective.recv(incoming, source=0)
            assert incoming.eq(0).all()
        flags = torch.ones(3)
        collective.all_reduce(flags).wait()
    return bool(flags.eq(3).all())


def test_gradients_are_refused_no_part() -> None:
    tensor = torch.ones(3, requires_grad=True)
    with World("shared_memory", 2) as pair:
        assert pair.run(run_leaf, tensor.detach()) == [[2.0, 2.0, 2.0]] * 2


def run_leaf(collective: Collective, tensor: Tensor) -> list[float]:
    leaf = tensor.clone().requires_grad_()
    collective.all_reduce(leaf).wait()
    assert leaf.is_leaf
    return leaf.tolist()


# ---- failures ----------------------------------------------------------------------------------------------------


def work_until_error(collective: Collective) -> tuple[str, str, float]:
    plain = torch.zeros(300_000)
    generator = random.Random(5)

    def work() -> None:
        memory = collective.allocate(4 * 100_000).view(torch.float32)
        while True:
            kind = generator.randrange(5)
            if kind == 0:
                collective.all_reduce(memory).wait()
            elif kind == 1:
                collective.all_reduce(plain).wait()
            elif kind == 2:
                collective.broadcast(plain, root=1)
            elif kind == 3:
                run_ring(collective, [Spec(1, torch.float32, (200_000,))] * collective.size)
            else:
                collective.all_gather(memory[: 1000 * collective.rank])

    return caught(work)


@pytest.mark.parametrize("attempt", range(4))
def test_survivors_of_a_killed_rank_name_it(trio: World, attempt: int) -> None:
    victim = attempt % 3
    trio.run(Collective.barrier)
    trio.start(work_until_error)
    time.sleep(random.Random(attempt).uniform(0.2, 0.5))
    killed_at = trio.kill(victim)
    for rank in {0, 1, 2} - {victim}:
        name, message, at = trio.result(rank)
        assert name == "PeerLost", message
        assert f"rank {victim} is lost" in message
        assert at - killed_at < 2.0


def test_gloo_survivors_of_a_killed_rank_raise() -> None:
    with World("gloo", 2) as pair:
        pair.run(Collective.barrier)
        pair.start(work_until_error)
        time.sleep(0.5)
        killed_at = pair.kill(1)
        name, message, at = pair.result(0)
        assert name == "PeerLost", message
        assert at - killed_at < 2.0


@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
def test_deadline(backend: str) -> None:
    with World(backend, 3, deadline_s=0.7) as world:
        results = world.run(run_late)
    for rank in (0, 1):
        first, second = results[rank]
        assert first[0] == "DeadlineExceeded"
        assert "all_reduce(sum)" in first[1]
        assert "0.7 s" in first[1]
        assert "unusable" in second[1]
        if backend == "shared_memory":
            assert "rank 2" in first[1]
            assert second[0] == "DeadlineExceeded"


def run_late(collective: Collective) -> list[tuple[str, str, float]]:
    collective.barrier()
    if collective.rank == 2:
        time.sleep(1.5)
        return []
    return [caught(lambda: collective.all_reduce(torch.ones(3)).wait()), caught(collective.barrier)]


def test_all_missing_ranks_are_named() -> None:
    with World("shared_memory", 3, deadline_s=0.5) as world:
        results = world.run(run_alone_at_barrier)
    assert results[0][0] == "DeadlineExceeded"
    assert "ranks 1, 2 have not" in results[0][1]


def run_alone_at_barrier(collective: Collective) -> tuple[str, str, float]:
    if collective.rank:
        time.sleep(1.0)
        return "", "", 0.0
    return caught(collective.barrier)


@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
@pytest.mark.parametrize("waiting_for", ["all_reduce", "recv"])
def test_abort_from_another_thread(backend: str, waiting_for: str) -> None:
    with World(backend, 2) as pair:
        results = pair.run(run_aborted, waiting_for)
    for name, message, _ in results[0][:2]:
        assert name == "Aborted"
        assert "the run is over" in message
    assert results[0][2] < 1.0
    if backend == "shared_memory":
        name, message, _ = results[1][0]
        assert name == "PeerLost"
        assert "rank 0" in message
        assert "the run is over" in message


def run_aborted(collective: Collective, waiting_for: str) -> list[Any]:
    collective.barrier()
    if collective.rank == 1:
        time.sleep(1.0)
        # gloo cannot tell the other side.
        if not isinstance(collective, SharedMemoryCollective):
            return []
        # What rank 0 had put in place before it was aborted still counts.
        return [caught(lambda: [collective.all_reduce(torch.ones(3)).wait() for _ in range(2)])]
    started_s = time.perf_counter()
    later(0.2, collective.abort, "the run is over")
    tensor = torch.ones(3)
    wait = {
        "all_reduce": lambda: collective.all_reduce(tensor).wait(),
        "recv": lambda: collective.recv(tensor, source=1),
    }[waiting_for]
    return [caught(wait), caught(collective.barrier), time.perf_counter() - started_s]


def all_reduce_of(*shape: int, dtype: torch.dtype = torch.float32, op: ReduceOp = "sum") -> Call:
    return lambda collective: collective.all_reduce(torch.ones(shape, dtype=dtype), op=op).wait()


def allocated_all_reduce(start: int) -> Call:
    def call(collective: Collective) -> None:
        memory = collective.allocate(400_000).view(torch.float32)
        collective.all_reduce(memory[start : start + 50_000]).wait()

    return call


def receive(collective: Collective) -> None:
    if collective.rank == 0:
        collective.recv(torch.zeros(3), source=1)
    else:
        collective.send(torch.zeros(4), destination=0).wait()
        collective.barrier()


# What rank 0 does, what rank 1 does, and what each error says.
DISAGREEMENTS: dict[str, tuple[Call, Call, list[str]]] = {
    "number of elements": (all_reduce_of(3), all_reduce_of(4), ["rank 0", "3 elements", "rank 1", "4 elements"]),
    "large": (all_reduce_of(70_000), all_reduce_of(900_000), ["70000 elements", "900000 elements"]),
    "dtype": (all_reduce_of(3), all_reduce_of(3, dtype=torch.int64), ["float32", "int64"]),
    "reduce operation": (all_reduce_of(3), all_reduce_of(3, op="max"), ["all_reduce(sum)", "all_reduce(max)"]),
    "operation": (all_reduce_of(3), lambda collective: collective.barrier(), ["all_reduce(sum)", "barrier"]),
    "place": (allocated_all_reduce(0), allocated_all_reduce(16), ["at byte 0", "at byte 64"]),
    "root": (
        lambda collective: collective.broadcast(torch.ones(3), root=0),
        lambda collective: collective.broadcast(torch.ones(3), root=1),
        ["from rank 0", "from rank 1"],
    ),
    "gathered dtypes": (
        lambda collective: collective.all_gather(torch.ones(3)),
        lambda collective: collective.all_gather(torch.ones(3, dtype=torch.uint8)),
        ["float32", "uint8"],
    ),
    "scattered shapes": (
        lambda collective: collective.reduce_scatter([torch.ones(3), torch.ones(1)]),
        lambda collective: collective.reduce_scatter([torch.ones(1), torch.ones(3)]),
        ["float32[3], float32[1]", "float32[1], float32[3]"],
    ),
    "allocated bytes": (
        lambda collective: collective.allocate(64),
        lambda collective: collective.allocate(128),
        ["rank 0 64 bytes", "rank 1 128 bytes"],
    ),
    "required value": (
        lambda collective: collective.require_equal("the seed", 1),
        lambda collective: collective.require_equal("the seed", 2),
        ["the seed", "rank 0 has 1", "rank 1 has 2"],
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_find_out(what: str) -> None:
    with World("shared_memory", 2) as pair:
        for name, message, _ in pair.run(run_disagreement, what):
            assert name == "TensorMismatch", message
            for part in DISAGREEMENTS[what][2]:
                assert part in message


@pytest.mark.parametrize("what", ["gathered dtypes", "scattered shapes", "required value"])
def test_ranks_that_disagree_over_gloo_find_out(what: str) -> None:
    with World("gloo", 2) as pair:
        for name, message, _ in pair.run(run_disagreement, what):
            assert name == "TensorMismatch", message


def run_disagreement(collective: Collective, what: str) -> tuple[str, str, float]:
    return caught(lambda: DISAGREEMENTS[what][:2][collective.rank](collective))


def test_receiver_of_another_form_finds_out() -> None:
    with World("shared_memory", 2) as pair:
        receiver, sender = pair.run(run_receive)
    assert receiver[0] == "TensorMismatch"
    assert "3 elements" in receiver[1]
    assert "rank 1 sends message of 4 elements" in receiver[1]
    assert sender[0] == "PeerLost"


def run_receive(collective: Collective) -> tuple[str, str, float]:
    return caught(lambda: receive(collective))


# ---- refusals ----------------------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Call, str, str]] = {
    "uint16": (all_reduce_of(3, dtype=torch.uint16), "TypeError", "uint16"),
    "float8": (all_reduce_of(3, dtype=torch.float8_e4m3fn), "TypeError", "float8_e4m3fn"),
    "mean of bool": (all_reduce_of(3, dtype=torch.bool, op="mean"), "TypeError", "mean of bool"),
    "min of complex": (all_reduce_of(3, dtype=torch.complex64, op="min"), "TypeError", "min of complex64"),
    "unknown operation": (all_reduce_of(3, op="avg"), "UsageError", "avg"),  # type: ignore[arg-type]
    "root": (lambda collective: collective.broadcast(torch.ones(1), root=9), "UsageError", "root 9"),
    "too few": (lambda collective: collective.all_to_all([]), "UsageError", "not 0"),
    "to oneself": (
        lambda collective: collective.send(torch.ones(1), destination=collective.rank),
        "UsageError",
        "rank",
    ),
    "from nobody": (lambda collective: collective.recv(torch.ones(1), source=9), "UsageError", "rank 9"),
    "no bytes": (lambda collective: collective.allocate(0), "ValueError", "at least one byte"),
}


def test_refusals_leave_the_collective_usable(world: World) -> None:
    for name, answers in zip(REFUSALS, zip(*world.run(run_refusals), strict=True), strict=True):
        for kind, message, _ in answers:
            assert (kind, REFUSALS[name][2] in message) == (REFUSALS[name][1], True), (name, message)


def run_refusals(collective: Collective) -> list[tuple[str, str, float]]:
    answers = [caught(functools.partial(call, collective)) for call, _, _ in REFUSALS.values()]
    collective.barrier()
    return answers


def test_mixed_dtypes_and_other_devices_are_refused() -> None:
    with World("shared_memory", 2) as pair:
        for mixed, elsewhere, overlapping in pair.run(run_more_refusals):
            assert mixed[0] == elsewhere[0] == "TypeError"
            assert overlapping[0] == "ValueError"
            assert "expand()" in overlapping[1]
            assert "float32, int64" in mixed[1]
            assert "meta" in elsewhere[1]


def run_more_refusals(collective: Collective) -> list[tuple[str, str, float]]:
    return [
        caught(lambda: collective.all_to_all([torch.ones(1), torch.ones(1, dtype=torch.int64)])),
        caught(lambda: collective.all_reduce(torch.ones(1, device="meta"))),
        caught(lambda: collective.all_reduce(torch.ones(1).expand(3))),
    ]


def test_alone_ends_with_abort_and_close() -> None:
    alone = AloneCollective()
    alone.abort("enough")
    with pytest.raises(Aborted, match="enough"):
        alone.barrier()
    closed = AloneCollective()
    closed.close()
    closed.close()
    with pytest.raises(UsageError, match="closed"):
        closed.all_reduce(torch.ones(1))


def test_alone_returns_copies() -> None:
    alone, tensor = AloneCollective(), torch.ones(3)
    for result in (*alone.all_gather(tensor), *alone.all_to_all([tensor]), alone.reduce_scatter([tensor])):
        result.zero_()
    assert tensor.tolist() == [1, 1, 1]


# ---- resources ---------------------------------------------------------------------------------------------------


def test_1000_operations_leak_no_descriptor(trio: World) -> None:
    assert trio.run(run_1000) == [0] * 3


def run_1000(collective: Collective) -> int:
    """Passes the wrap-around of the 32-bit counters, too."""
    memory = collective.allocate(4 * 20_000).view(torch.float32)
    plain = torch.zeros(20_000)
    before = open_descriptors()
    for number in range(200):
        memory.fill_(number)
        collective.all_reduce(memory).wait()
        assert memory.eq(collective.size * number).all()
        collective.all_reduce(plain[:10]).wait()
        assert [len(part) for part in collective.all_gather(plain[: collective.rank])] == [0, 1, 2]
        collective.broadcast(plain, root=number % collective.size)
        run_ring(collective, [Spec(1, torch.float32, (5,))] * collective.size)
    return open_descriptors() - before


def test_close_gives_everything_back() -> None:
    with World("shared_memory", 2) as pair:
        for counts in pair.run(run_and_close):
            # What is left: the segment that the test still holds a tensor of.
            assert counts == (1, "UsageError", 7.0)


def run_and_close(collective: Collective) -> tuple[int, str, float]:
    tensor = collective.allocate(400).view(torch.float32).fill_(7)
    collective.barrier()
    collective.close()
    collective.close()
    left = [fd for fd in os.listdir("/proc/self/fd") if "memfd:paceline" in _target(fd) or "pidfd" in _target(fd)]
    return len(left), caught(collective.barrier)[0], float(tensor[99])


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_memory_has_no_name(trio: World) -> None:
    trio.run(run_allocation)
    for pid in trio.pids():
        files = mapped_files(pid)
        assert any("memfd:paceline" in path for path in files)
        assert not any(path.startswith("/dev/shm") for path in files)


def run_allocation(collective: Collective) -> None:
    collective.allocate(2**20).fill_(1)


def test_time_and_bytes_are_accounted_for() -> None:
    with World("shared_memory", 2) as pair:
        waited, was_late = pair.run(run_timed)
    assert waited[0] > 0.25
    assert was_late[0] < 0.1
    # Each of two ranks reads half of the other's 4 MB, and writes half.
    assert waited[1] == was_late[1] == 4_000_000
    assert waited[2] > 0


def run_timed(collective: Collective) -> tuple[float, int, float]:
    memory = collective.allocate(4_000_000).view(torch.float32)
    collective.barrier()
    timing = collective.timing
    waiting_s, moved_bytes, communication_s = timing.waiting_s, timing.moved_bytes, timing.communication_s
    if collective.rank == 1:
        time.sleep(0.3)
    collective.all_reduce(memory).wait()
    return timing.waiting_s - waiting_s, timing.moved_bytes - moved_bytes, timing.communication_s - communication_s


def test_segment_of_a_process_that_is_gone() -> None:
    segment = Segment.create(4096)
    segment.tensor[0] = 5
    again = Segment.open(segment.address)
    assert again.tensor[0] == 5
    segment.close()
    with pytest.raises(PeerLost, match=f"process {os.getpid()}"):
        Segment.open(segment.address)
    view = again.tensor[:1]
    again.close()
    assert view.item() == 5
    with pytest.raises(ValueError, match="at least one byte"):
        Segment.create(0)


def test_futex_sleeps_until_woken_changed_or_late() -> None:
    segment = Segment.create(4096)
    address = segment.tensor.data_ptr()
    assert timed(lambda: futex.wait(address, 1, 5.0)) < 1.0
    assert 0.05 < timed(lambda: futex.wait(address, 0, 0.1)) < 1.0
    later(0.1, futex.wake, address)
    assert timed(lambda: futex.wait(address, 0, 5.0)) < 1.0
    with pytest.raises(OSError, match="futex wait"):
        futex.wait(address + 1, 0, 0.1)
    segment.close()


def timed(function: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def test_gloo_needs_an_address_of_this_host() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1.*127\.0\.0\.1"):
        connect_gloo(dist.HashStore(), rank=0, size=1, address="192.0.2.1")


def test_gloo_ranks_that_do_not_come() -> None:
    with pytest.raises(DeadlineExceeded, match="not all of 2 ranks"):
        connect_gloo(dist.HashStore(), rank=0, size=2, address="127.0.0.1", deadline_s=0.5)


def test_shared_memory_agrees_with_gloo() -> None:
    spec = Spec(3, torch.float32, (70_001,))
    with World("shared_memory", 2) as one, World("gloo", 2) as other:
        for op in REDUCE_OPS:
            pairs = zip(one.run(run_all_reduce, spec, op, True), other.run(run_all_reduce, spec, op, True), strict=True)
            assert all(same_bits(*pair) for pair in pairs)  # of two terms there is one order only
