"""Ranks that ask for different things, and arguments that no rank may pass."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.comm.base import Collective, ReduceOp
from tests.unit.collective_examples import WORLDS
from tests.unit.collective_harness import World, caught

Call = Callable[[Collective], Any]
KINDS = ("CallMismatch", "TensorMismatch")


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    backend, size = request.param
    with World(backend, size) as world:
        yield world


def all_reduce_of(*shape: int, dtype: torch.dtype = torch.float32, op: ReduceOp = "sum") -> Call:
    return lambda collective: collective.all_reduce(torch.ones(shape, dtype=dtype), op=op).wait()


def allocated_all_reduce(start: int) -> Call:
    def call(collective: Collective) -> None:
        memory = collective.allocate(400_000).view(torch.float32)
        collective.all_reduce(memory[start : start + 50_000]).wait()

    return call


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
    "root of a gather": (
        lambda collective: collective.gather(torch.ones(3), root=0),
        lambda collective: collective.gather(torch.ones(3), root=1),
        ["to rank 0", "to rank 1"],
    ),
    "root of a scatter": (
        lambda collective: collective.scatter([torch.ones(3)] * 2, root=0),
        lambda collective: collective.scatter([torch.ones(3)] * 2, root=1),
        ["scatter from rank 0", "scatter from rank 1"],
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
            assert name in KINDS, message
            for part in DISAGREEMENTS[what][2]:
                assert part in message


# Between hosts memory has no place that others know.
@pytest.mark.parametrize("what", sorted(set(DISAGREEMENTS) - {"place", "allocated bytes"}))
def test_ranks_that_disagree_over_gloo_find_out(what: str) -> None:
    with World("gloo", 2) as pair:
        for name, message, _ in pair.run(run_disagreement, what):
            assert name in KINDS, message
            assert "rank 0" in message
            assert "rank 1" in message


def test_all_of_three_ranks_over_gloo_find_out() -> None:
    """Also the two that agree, and of an operation that is not the first."""
    with World("gloo", 3) as trio:
        for name, message, _ in trio.run(run_late_disagreement):
            assert name in KINDS, message
            assert "rank 2" in message
            assert "7001 elements of float32" in message


def run_late_disagreement(collective: Collective) -> tuple[str, str, float]:
    for _ in range(3):
        collective.all_reduce(torch.ones(7000)).wait()
    tensors = [torch.ones(100), torch.ones(7000 + collective.rank // 2)]
    return caught(lambda: [work.wait() for work in [collective.all_reduce(tensor) for tensor in tensors]])


def test_asynchronous_reductions_of_new_forms_do_not_block_over_gloo() -> None:
    """Rank 1 reduces only after a message that rank 0 sends once its own reductions are under way."""
    with World("gloo", 2) as pair:
        assert pair.run(run_message_between) == [True, True]


def run_message_between(collective: Collective) -> bool:
    tensors = [torch.ones(10), torch.ones(20), torch.ones(10)]
    message = torch.ones(5)
    if collective.rank == 1:
        collective.recv(message, source=0).wait()
    works = [collective.all_reduce(tensor) for tensor in tensors]
    if collective.rank == 0:
        collective.send(message, destination=1).wait()
    for work in reversed(works):
        work.wait()
    return all(bool(tensor.eq(2).all()) for tensor in tensors)


def run_disagreement(collective: Collective, what: str) -> tuple[str, str, float]:
    return caught(lambda: DISAGREEMENTS[what][:2][collective.rank](collective))


REFUSALS: dict[str, tuple[Call, str, str]] = {
    "uint16": (all_reduce_of(3, dtype=torch.uint16), "TypeError", "uint16"),
    "float8": (all_reduce_of(3, dtype=torch.float8_e4m3fn), "TypeError", "float8_e4m3fn"),
    "mean of bool": (all_reduce_of(3, dtype=torch.bool, op="mean"), "TypeError", "mean of bool"),
    "min of complex": (all_reduce_of(3, dtype=torch.complex64, op="min"), "TypeError", "min of complex64"),
    "unknown operation": (all_reduce_of(3, op="avg"), "UsageError", "avg"),  # type: ignore[arg-type]
    "root": (lambda collective: collective.broadcast(torch.ones(1), root=9), "UsageError", "root 9"),
    "root of a gather": (lambda collective: collective.gather(torch.ones(1), root=9), "UsageError", "root 9"),
    "scatter to too many": (
        lambda collective: collective.scatter([torch.ones(1)] * 9, root=collective.rank),
        "UsageError",
        "not 9",
    ),
    "nothing to scatter": (
        lambda collective: collective.scatter(None, root=collective.rank),
        "UsageError",
        "not 0",
    ),
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


def test_only_the_root_scatters() -> None:
    with World("shared_memory", 2) as pair:
        name, message, _ = pair.run(run_scatter_from_all)[1]
    assert name == "UsageError"
    assert "only the root, rank 0, gives tensors" in message


def run_scatter_from_all(collective: Collective) -> tuple[str, str, float]:
    if collective.rank == 0:
        return "", "", 0.0
    return caught(lambda: collective.scatter([torch.ones(1)] * 2, root=0))


@pytest.mark.parametrize("has_sent_before", [False, True])
def test_a_message_over_gloo_that_cannot_come_is_told_at_once(has_sent_before: bool) -> None:
    """Rank 1 waits for a message of rank 0, which waits for all in another operation."""
    with World("gloo", 3) as trio:
        trio.run(run_nothing)
        answers = trio.run(run_message_left_out, has_sent_before)
    assert answers[1][0] == "CallMismatch"
    assert re.search(r"rank 1 waits for recv from rank 0 of .*, which waits for rank 1 to take part in", answers[1][1])
    assert "leave out a batch or a step only where all do" in answers[1][1]
    assert all(name in ("CallMismatch", "PeerLost") for name, _, _ in answers), answers


def run_nothing(collective: Collective) -> None:
    for _ in range(2):
        collective.all_gather_object(collective.rank)


def run_message_left_out(collective: Collective, has_sent_before: bool) -> tuple[str, str, float]:
    def exchange() -> None:
        if has_sent_before and collective.rank == 0:
            collective.send(torch.ones(5), destination=1).wait()
        if has_sent_before and collective.rank == 1:
            collective.recv(torch.ones(5), source=0).wait()
        if collective.rank == 1:
            collective.recv(torch.ones(5), source=0).wait()
        else:
            collective.all_gather_object(collective.rank)

    return caught(exchange)


def test_a_slow_message_over_gloo_is_waited_for() -> None:
    """Its sender already waits for the others."""
    with World("gloo", 2) as pair:
        assert pair.run(run_slow_message) == [True, True]


def run_slow_message(collective: Collective) -> bool:
    if collective.rank == 0:
        work = collective.send(torch.ones(5), destination=1)
        collective.all_gather_object("sent")
        work.wait()
        return True
    time.sleep(1.0)
    tensor = torch.zeros(5)
    collective.recv(tensor, source=0).wait()
    collective.all_gather_object("received")
    return bool(tensor.eq(1).all())


@pytest.mark.parametrize("is_through", [False, True])
def test_others_see_where_a_rank_stands_unless_it_is_through(is_through: bool) -> None:
    with World("shared_memory", 2) as pair:
        standing = pair.run(run_one_that_waits_for_all, is_through)[1]
    assert standing == (None if is_through else "rank 0 waits for all in barrier")


def run_one_that_waits_for_all(collective: Collective, is_through: bool) -> str | None:
    found = None
    if collective.rank == 0 and is_through:
        collective.be_through()
    if collective.rank == 1:
        until_s = time.monotonic() + (0.5 if is_through else 60.0)
        while found is None and time.monotonic() < until_s:
            found = collective.standing()
    collective.barrier()
    return found
