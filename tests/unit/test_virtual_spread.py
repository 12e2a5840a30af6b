"""What workers in other processes and the simulation talk by: frames, tensors on their way, and records in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.shared_memory.block import SharedBlock
from paceline.engines.virtual.spread.carrier import Carrier
from paceline.engines.virtual.spread.channel import Channel
from paceline.engines.virtual.spread.order import RecordsInOrder
from paceline.engines.virtual.spread.turns import GO, Turns
from paceline.records import MetricRecord, Record


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@given(frames=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=100)), max_size=20))
def test_frames_arrive_whole_and_in_order(frames: list[tuple[int, bytes]]) -> None:
    one, other = (Channel(end) for end in socket.socketpair())
    try:
        for number, content in frames:
            one.send(number, content)
        assert [other.receive() for _ in frames] == frames
    finally:
        one.close()
        other.close()


def test_two_ends_with_much_to_say_do_not_wait_for_each_other(ends: tuple[Channel, Channel]) -> None:
    """Each says far more than the socket holds before it listens."""
    much = bytes(range(256)) * 40_000
    heard: dict[int, list[bytes]] = {}

    def talk(number: int) -> None:
        for _ in range(3):
            ends[number].send(number, much)
        heard[number] = [ends[number].receive()[1] for _ in range(3)]
        ends[number].send(number, b"heard all")  # which lets what has not left yet leave
        ends[number].receive()

    threads = [threading.Thread(target=talk, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard == {0: [much] * 3, 1: [much] * 3}


def test_an_end_that_is_gone_is_noticed(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(7, b"last words")
    ends[0].close()
    assert ends[1].receive() == (7, b"last words")
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(EOFError):
        ends[1].send(1, b"too late")


def test_what_is_here_is_had_without_waiting(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert other.poll() is None
    one.send(3, b"first")
    one.send(4, b"")
    assert [other.poll(), other.poll(), other.poll()] == [(3, b"first"), (4, b""), None]
    one.close()
    with pytest.raises(EOFError):
        other.poll()


def test_who_is_answered_comes_before_who_computes(ends: tuple[Channel, Channel]) -> None:
    simulation, crew = ends
    turns = Turns(crew)
    turns.leave(1, until_s=2.0)
    turns.leave(2, until_s=1.0)
    simulation.send(GO, b"")
    assert turns.next() == (2, None)  # the one that others wait for first
    simulation.send(5, b"an answer")
    assert turns.next() == (5, b"an answer")
    simulation.send(6, b"another")  # nobody computes before the simulation waits again
    assert turns.next() == (6, b"another")
    turns.leave(5, until_s=3.0)
    simulation.send(GO, b"")
    assert turns.next() == (1, None)
    assert turns.next() == (5, None)
    simulation.close()
    with pytest.raises(EOFError):
        turns.next()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
def test_a_tensor_arrives_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    message = {"a": [tensor, tensor.t() if len(shape) == 2 else tensor], "b": "text"}
    found = Carrier().unpack(Carrier().pack(message))
    assert found["b"] == "text"
    for sent, arrived in zip(message["a"], found["a"], strict=True):  # type: ignore[arg-type]
        assert arrived.dtype == dtype
        assert torch.equal(arrived, sent)  # type: ignore[arg-type]


def test_a_tensor_in_shared_memory_stays_there() -> None:
    here, there = Carrier(), Carrier()
    for _ in range(2):
        segment = SharedBlock.create(4096)
        here.share(segment)
        own = there.share(SharedBlock.open(segment.address))
    whole = segment.tensor.view(torch.float32)
    parts = [whole[8:24].view(4, 4), whole[8:24].view(4, 4).t()[1:, ::2], whole[100]]
    arrived = there.unpack(here.pack(parts))
    for number, (sent, found) in enumerate(zip(parts, arrived, strict=True)):
        found.fill_(number + 1.0)
        assert torch.equal(sent, torch.full_like(sent, number + 1.0))
        assert found.shape == sent.shape
        assert own.data_ptr() <= found.data_ptr() < own.data_ptr() + 4096
    assert here.holds(parts[0])
    assert not here.holds(torch.ones(3))


@given(st.data())
def test_records_come_turn_by_turn(data: st.DataObject) -> None:
    """Turns begin in order; what is said in them, and when they end, is heard in any."""
    emitted: list[Record] = []
    order = RecordsInOrder(emitted.append)
    num_turns, said = 0, dict[int, list[Record]]()
    under_way: list[int] = []
    for _ in range(data.draw(st.integers(0, 40))):
        deed = data.draw(st.sampled_from(["begin", "say", "end"]))
        if deed == "begin" or not under_way:
            num_turns += 1
            under_way.append(num_turns)
            said[num_turns] = []
            order.begin(num_turns)
            continue
        turn = data.draw(st.sampled_from(under_way))
        if deed == "say":
            record = MetricRecord(turn, len(said[turn]), 0, 0.0, "x", 0.0)
            said[turn].append(record)
            order.add(turn, record)
        else:
            under_way.remove(turn)
            order.end(turn)
    heard_first = under_way[0] if under_way else num_turns
    assert emitted == [record for turn in range(1, heard_first + 1) for record in said[turn]]
    order.close()
    assert emitted == [record for turn in range(1, num_turns + 1) for record in said[turn]]
