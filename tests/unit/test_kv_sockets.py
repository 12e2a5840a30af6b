"""The key-value store over sockets, with servers and workers in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paceline.comm import wire
from paceline.comm.wire import Caller, Keys, Listener
from paceline.engines.striking import connections
from paceline.errors import DeadlineExceeded, UsageError
from paceline.kv import Group, SignificantlyModified, Spec
from paceline.kv import store as store_module
from paceline.kv.serving import Server
from paceline.messages import Kind, Message


@contextmanager
def served(**settings: Any) -> Iterator[Group]:
    spec, keys = Spec(**{"servers": 2, "workers": 2, "num_keys": 100, **settings}), Keys.generate()
    servers = [Server(spec, index, keys, host="127.0.0.1") for index in range(spec.servers)]
    threads = [threading.Thread(target=server.serve, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield Group(spec, keys, tuple(server.endpoint for server in servers))
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.stop()
            thread.join()


@pytest.mark.parametrize("rule", ["asp", "bsp"])
def test_what_workers_push_is_there(rule: str) -> None:
    keys = torch.arange(10, 90)
    with served(rule=rule) as group, ThreadPoolExecutor() as pool:

        def work(rank: int) -> torch.Tensor:
            with group.connect(rank) as store:
                pushes = [store.push(keys, torch.full((80,), rank + 1.0)) for _ in range(20)]
                store.wait(*pushes)
                if rule == "bsp":
                    assert store.result(store.pull(range(10, 11))).values.item() == 60
                store.barrier()
                assert store.sent_bytes > 20 * keys.nbytes / 2
                assert store.sent_bytes < 20 * (80 * 4 + 1000) + keys.nbytes  # the keys went once
                return store.result(store.pull(keys)).values[:, 0]

        for values in pool.map(work, range(2)):
            assert values.tolist() == [60.0] * 80


def test_servers_end_when_all_workers_have_left() -> None:
    spec, keys = Spec(servers=1, workers=1), Keys.generate()
    server = Server(spec, 0, keys, host="127.0.0.1")
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    store = Group(spec, keys, (server.endpoint,)).connect(0)
    store.push([2**62], torch.ones(1))
    store.close()
    store.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_wait_for_a_worker_that_is_not_there_ends_and_names_the_request() -> None:
    with served(rule="bsp") as group:
        store = group.connect(0, deadline_s=0.2)
        push = store.push([3], torch.ones(1))
        with pytest.raises(
            DeadlineExceeded,
            match=r"server\(s\) 0, 1 owe worker 0 the answer to PUSH_VALUES 1.*Either.*connected as worker 0; or",
        ):
            store.wait(push)
        store.close(waits=False)
        with pytest.raises(UsageError, match="none of number 2"):
            group.connect(2)


def test_an_error_of_a_request_is_raised() -> None:
    with served() as group, group.connect(0) as store:
        with pytest.raises(UsageError, match="there is no function 'subtract'; known are add, assign"):
            store.wait(store.push([3], torch.ones(1), function="subtract"))
        assert store.result(store.pull([3])).values.item() == 0
        with pytest.raises(UsageError, match="was no PULL_VALUES"):
            store.result(store.push([3], torch.ones(1), filters=[SignificantlyModified(2.0)]))


def test_a_closed_store_is_asked_nothing() -> None:
    with served() as group:
        store = group.connect(0)
        store.close()
        with pytest.raises(UsageError, match="worker 0 has closed its store"):
            store.pull([3])


def test_buffers_are_free_when_push_returns() -> None:
    num_keys = 1_000_000
    with served(num_keys=num_keys) as group, group.connect(0) as store:
        keys, values = torch.arange(num_keys), torch.ones(num_keys)
        pushes = [store.push(keys, values), store.push(range(num_keys), values)]
        keys.zero_()
        values.zero_()
        store.wait(*pushes)
        assert store.result(store.pull(range(num_keys))).values.unique().tolist() == [2]


def test_whoever_closes_with_an_error_pending_has_left() -> None:
    with served() as group, group.connect(1) as other:
        store = group.connect(0)
        store.push([3], torch.ones(1), function="subtract")
        assert all(caller.socket.poll(60_000) for caller in store._callers)  # the errors are there, and not taken
        with pytest.raises(UsageError, match="no function 'subtract'"):
            store.close()
        other.barrier()
        with pytest.raises(KeyError, match="own"):
            fail_after_a_refusal(group)


def fail_after_a_refusal(group: Group) -> None:
    with group.connect(0) as store:
        store.push([3], torch.ones(1))  # which is refused: the number has served
        assert store._callers[0].socket.poll(60_000)
        raise KeyError("the program's own")


def test_an_error_of_one_request_does_not_stop_the_next() -> None:
    with served() as group, group.connect(0) as store:
        store.push([3], torch.ones(1), function="subtract")
        assert all(caller.socket.poll(60_000) for caller in store._callers)
        changed = SignificantlyModified(0.5)
        with pytest.raises(UsageError, match="shape"):
            store.push([3], torch.ones(2), filters=[changed])
        push = store.push([3], torch.ones(1), filters=[changed])
        with pytest.raises(UsageError, match="no function 'subtract'"):
            store.wait(push)
        assert store.result(store.pull([3])).values.item() == 1
        store.wait(store.push([], torch.empty(0), filters=[changed]))


@pytest.mark.skipif(bool(connections.lack()), reason=connections.lack())
def test_a_server_that_is_busy_as_a_connection_breaks_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets nobody in by the worker's name before it has read what came over the old connection."""
    for module in (wire, store_module):
        monkeypatch.setattr(module, "AGAIN_S", 0.2)
    receive = Listener.receive
    num_cut: list[int] = []

    def standing_still(listener: Listener) -> Any:
        arrived = receive(listener)
        if not num_cut:
            assert listener.socket.poll(60_000)
            port = int(listener.endpoint.rsplit(":", 1)[1])
            before = [ends for ends in connections.own_connections() if port in (ends[0][1], ends[1][1])]
            connections.cut(before)
            num_cut.append(len(before))
            time.sleep(0.3)
        return arrived

    monkeypatch.setattr(Listener, "receive", standing_still)
    with served(servers=1) as group, group.connect(0, deadline_s=60.0) as store:
        store.wait(*[store.push([3], torch.ones(1)) for _ in range(3)])
        assert store.result(store.pull([3])).values.item() == 3
    assert num_cut == [2]


def test_nobody_speaks_for_another_worker() -> None:
    with served(servers=1) as group, group.connect(0) as store:
        stranger = Caller(group.keys, endpoint=group.endpoints[0], identity="kv-1")
        stranger.send(Message(Kind.LEAVE, 1, 0, clock=50))
        stranger.socket.send_multipart([b"no message"])
        stranger.send(Message(Kind.READ_CLOCKS, 1, 1, clock=1, body={"range": [0, 100]}))
        assert stranger.socket.poll(60_000)
        answer = Message.decode(stranger.receive() or [], epoch=1)
        assert answer.body == {"clocks": [[0, 100, [0, 0], [1, 0]]]}
        store.wait(store.push([3], torch.ones(1)))
        assert {each.clocks[0] for each in store.clocks(range(0, 100))} == {1}
        stranger.close()
