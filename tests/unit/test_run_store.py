"""Torch's store over the run's encrypted sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import zmq
from torch.distributed import PrefixStore

from paceline.comm.meeting import exchange
from paceline.comm.process_group.collective import connect_gloo
from paceline.comm.run_store import RunStore, StoreKeeper
from paceline.comm.wire import Keys, Listener
from paceline.errors import Aborted
from paceline.messages import Kind, Message, WireError

EPOCH = 3
WITHIN_S = 60.0
KEYS = Keys.generate()


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A launcher that keeps a store."""
    listener, keeper, is_over = Listener(KEYS, host="127.0.0.1"), StoreKeeper(), threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            if listener.socket.poll(10, zmq.POLLIN):
                asked = listener.receive()
                if asked is not None:
                    listener.send(asked[0], keeper.answer(Message.decode(asked[1], epoch=EPOCH)))

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.endpoint
    is_over.set()
    thread.join()
    listener.close()


def joining(endpoint: str, rank: int) -> RunStore:
    return RunStore(KEYS, endpoint=endpoint, identity=f"store-{rank}", epoch=EPOCH)


def of_ranks(endpoint: str, size: int, program: Callable[[RunStore, int], object]) -> list[object]:
    """What the program returns on each of several ranks, a thread each."""
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        with closing(joining(endpoint, rank)) as store:
            results[rank] = program(store, rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    return [results[rank] for rank in range(size)]


def test_what_one_rank_sets_another_gets(endpoint: str) -> None:
    def program(store: RunStore, rank: int) -> object:
        if rank == 0:
            time.sleep(0.1)
            store.set("text", "here")
            store.set("bytes", bytes(range(256)) * 8192)
            store.set("none", b"")
        store.wait(["text", "none"])
        return store.get("text"), store.get("bytes"), store.get("none"), store.check(["text", "bytes"])

    expected = b"here", bytes(range(256)) * 8192, b"", True
    assert of_ranks(endpoint, 2, program) == [expected, expected]


def test_adding_counts_each_once(endpoint: str) -> None:
    assert sorted(map(int, of_ranks(endpoint, 4, lambda store, rank: store.add("n", 1)))) == [1, 2, 3, 4]  # type: ignore[call-overload]


def test_ranks_meet_and_reduce_over_gloo(endpoint: str) -> None:
    def program(store: RunStore, rank: int) -> object:
        said = exchange(PrefixStore("present", store), str(rank), rank=rank, size=3, deadline_s=WITHIN_S)
        with closing(connect_gloo(PrefixStore("gloo", store), rank=rank, size=3, address="127.0.0.1")) as collective:
            tensor = torch.full((5,), float(rank))
            collective.all_reduce(tensor).wait()
            collective.barrier()
        return said, tensor.tolist()

    assert of_ranks(endpoint, 3, program) == [(["0", "1", "2"], [3.0] * 5)] * 3


def test_a_key_that_does_not_come_is_named(endpoint: str) -> None:
    with closing(joining(endpoint, 0)) as store, pytest.raises(TimeoutError, match=r"timed out waiting for .*'absent'"):
        store.wait(["absent"], timedelta(seconds=0.05))


def test_an_abort_ends_the_meeting_of_torch_itself(endpoint: str) -> None:
    with closing(joining(endpoint, 0)) as store:
        timer = threading.Timer(0.3, store.abort, ["another member failed"])
        timer.start()
        began_s = time.monotonic()
        with pytest.raises(Aborted, match="another member failed"):
            connect_gloo(PrefixStore("gloo", store), rank=0, size=2, address="127.0.0.1", deadline_s=WITHIN_S)
        assert time.monotonic() - began_s < WITHIN_S / 4
        timer.join()


def test_a_stranger_learns_and_changes_nothing(endpoint: str) -> None:
    others = Keys.generate()
    stranger = Keys(KEYS.server_public, b"", others.client_public, others.client_secret)
    with closing(joining(endpoint, 0)) as store:
        store.set("key", b"ours")
        with closing(RunStore(stranger, endpoint=endpoint, identity="store-1", epoch=EPOCH)) as outside:
            timer = threading.Timer(1.0, outside.abort, ["nobody answered"])
            timer.start()
            with pytest.raises(Aborted, match="nobody answered"):
                outside.set("key", b"theirs")
            timer.join()
        assert store.get("key") == b"ours"


@pytest.mark.parametrize("body", [{}, {"get": 1}, {"add": "k", "get": []}, {"add": "k", "amount": "x", "get": []}])
def test_a_request_that_is_none_raises_what_launchers_refuse(body: dict[str, object]) -> None:
    with pytest.raises((WireError, ValueError, TypeError, KeyError)):
        StoreKeeper().answer(Message(Kind.STORE, EPOCH, body=body))
