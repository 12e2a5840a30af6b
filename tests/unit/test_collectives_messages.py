"""Messages from one rank to another: in order, several under way at once, and beside collective operations."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.base import Collective
from tests.unit.collective_examples import MOVABLE, WORLDS, Spec, check, one_each, same_bits, specs
from tests.unit.collective_harness import World, caught


@pytest.fixture(scope="module", params=WORLDS[1:], ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    backend, size = request.param
    with World(backend, size) as world:
        yield world


def run_ring(collective: Collective, each: Sequence[Spec]) -> Tensor:
    """Send to the next rank while receiving from the one before."""
    rank, size = collective.rank, collective.size
    sending = collective.send(each[rank].make(rank), destination=(rank + 1) % size)
    source = (rank - 1) % size
    incoming = torch.zeros_like(each[source].make(source))
    collective.recv(incoming, source=source).wait()
    sending.wait()
    assert sending.poll()
    return incoming


def test_send_and_recv_around_a_ring(world: World) -> None:
    def test(each: list[Spec]) -> None:
        for rank, result in enumerate(world.run(run_ring, each)):
            source = (rank - 1) % world.size
            assert same_bits(result, each[source].make(source))

    check(world, st.sampled_from(MOVABLE).flatmap(lambda dtype: one_each(world.size, dtype)), test)


def run_all_pairs(collective: Collective, each: Sequence[Spec], seed: int) -> bool:
    """All messages between all ranks are under way before any is waited for, in an order of this rank's own."""
    rank, size = collective.rank, collective.size
    others = [other for other in range(size) if other != rank]
    incoming = {(other, n): torch.zeros_like(spec.make(0)) for other in others for n, spec in enumerate(each)}
    works = []
    generator = random.Random(seed + rank)
    for other in generator.sample(others, len(others)):
        if generator.random() < 0.5:
            works += [collective.recv(incoming[other, n], source=other) for n in range(len(each))]
            works += [collective.send(spec.make(100 * rank + n), destination=other) for n, spec in enumerate(each)]
        else:
            works += [collective.send(spec.make(100 * rank + n), destination=other) for n, spec in enumerate(each)]
            works += [collective.recv(incoming[other, n], source=other) for n in range(len(each))]
    for work in generator.sample(works, len(works)):
        work.wait()
        assert work.poll()
    return all(same_bits(tensor, each[n].make(100 * other + n)) for (other, n), tensor in incoming.items())


def test_many_messages_between_all_ranks(world: World) -> None:
    def test(example: tuple[list[Spec], int]) -> None:
        assert all(world.run(run_all_pairs, *example))

    check(world, st.tuples(st.lists(specs(MOVABLE), min_size=1, max_size=6), st.integers(0, 99)), test)


def test_receives_are_over_in_the_order_of_the_calls(world: World) -> None:
    assert all(world.run(run_in_order, 12))


def run_in_order(collective: Collective, count: int) -> bool:
    """The receiver asks again and again which of many receives are over, the last one first."""
    shapes = [(1 + 70_000 * (number % 3),) for number in range(count)]
    if collective.rank == 1:
        for number, shape in enumerate(shapes):
            collective.send(torch.full(shape, float(number)), destination=0).wait()
    if collective.rank != 0:
        return True
    tensors = [torch.zeros(shape) for shape in shapes]
    works = [collective.recv(tensor, source=1) for tensor in tensors]
    while not all(is_over := [work.poll() for work in reversed(works)]):
        # A later look at an earlier one may find it over, but not the other way round.
        assert is_over == sorted(is_over)
        time.sleep(1e-4)
    return all(bool(tensor.eq(number).all()) for number, tensor in enumerate(tensors))


def test_a_posted_receive_does_not_block(world: World) -> None:
    """All ranks receive before they send: with receives that block nobody would ever send."""
    assert all(world.run(run_receive_first))


def run_receive_first(collective: Collective) -> bool:
    rank, size = collective.rank, collective.size
    incoming = torch.zeros(300_000)
    receiving = collective.recv(incoming, source=(rank - 1) % size)
    sending = collective.send(torch.full((300_000,), float(rank)), destination=(rank + 1) % size)
    receiving.wait()
    sending.wait()
    return bool(incoming.eq((rank - 1) % size).all())


def test_messages_under_way_do_not_hold_up_collectives(world: World) -> None:
    assert all(world.run(run_messages_across_all_reduce))


def run_messages_across_all_reduce(collective: Collective) -> bool:
    rank, size = collective.rank, collective.size
    big, incoming = torch.full((500_000,), float(rank)), torch.zeros(500_000)
    works = []
    if rank == 0:
        works.append(collective.send(big, destination=1))
    if rank == 1:
        works.append(collective.recv(incoming, source=0))
    flags = torch.ones(3)
    collective.all_reduce(flags).wait()
    collective.barrier()
    for work in works:
        work.wait()
    return bool(flags.eq(size).all() and incoming.eq(0).all())


def test_receiving_into_a_view_leaves_the_rest_alone(world: World) -> None:
    for row in world.run(run_strided):
        assert row in ([0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1])


def run_strided(collective: Collective) -> list[float]:
    holder = torch.zeros(6)
    if collective.rank == 0:
        collective.send(torch.ones(3), destination=1).wait()
    if collective.rank == 1:
        collective.recv(holder[1::2], source=0).wait()
    return holder.tolist()


def test_receiver_of_another_form_finds_out() -> None:
    with World("shared_memory", 2) as pair:
        receiver, sender = pair.run(run_mismatched)
    assert receiver[0] == "TensorMismatch"
    assert "3 elements" in receiver[1]
    assert "rank 1 sends message of 4 elements" in receiver[1]
    assert sender[0] == "PeerLost"


def test_a_message_of_another_form_never_arrives_over_gloo() -> None:
    with World("gloo", 2, deadline_s=2.0) as pair:
        receiver, sender = pair.run(run_mismatched_and_sleep)
    assert sender[0] == "False"
    assert receiver[0] == "DeadlineExceeded"
    assert "rank 1 has not taken part in recv from rank 1 of message of 3 elements of float32" in receiver[1]


def run_mismatched(collective: Collective) -> tuple[str, str, float]:
    def call() -> Any:
        if collective.rank == 0:
            collective.recv(torch.zeros(3), source=1).wait()
        else:
            collective.send(torch.zeros(4), destination=0).wait()
            collective.barrier()

    return caught(call)


def run_mismatched_and_sleep(collective: Collective) -> tuple[str, str, float]:
    if collective.rank == 0:
        return caught(lambda: collective.recv(torch.zeros(3), source=1).wait())
    sending = collective.send(torch.zeros(4), destination=0)
    time.sleep(3.0)
    return str(sending.poll()), "", 0.0
