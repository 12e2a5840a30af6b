"""The sockets that carry messages: who is let in, and what becomes of messages when a connection breaks."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
import zmq

from paceline.comm import wire
from paceline.comm.wire import Caller, Keys, Listener
from paceline.engines.striking import connections
from paceline.messages import Kind, Message, from_frames, to_frames
from tests.distributed.harness import wait_until
from tests.threads import running, started_since

WITHIN_S = 60.0
SILENCE_S = 0.3


@pytest.fixture
def keys() -> Keys:
    return Keys.generate()


@contextmanager
def listening(keys: Keys, host: str = "127.0.0.1") -> Iterator[Listener]:
    with closing(Listener(keys, host=host)) as listener:
        yield listener


@contextmanager
def calling(keys: Keys, listener: Listener, name: str = "worker-0") -> Iterator[Caller]:
    with closing(Caller(keys, endpoint=listener.endpoint, identity=name)) as caller:
        yield caller


def receive(end: Listener | Caller, *, within_s: float = WITHIN_S) -> Any:
    """What its own `receive` gives, once there is a message."""
    until_s = time.monotonic() + within_s
    while True:
        has_come = end.socket.poll(int(min(0.1, within_s) * 1000))
        received = end.receive() if has_come or isinstance(end, Caller) else None
        if received is not None or (not has_come and time.monotonic() >= until_s):
            return received


def exchange(listener: Listener, caller: Caller, text: str = "hello") -> None:
    """A question and its answer, with tensors."""
    sent = torch.arange(300_000, dtype=torch.float32)
    caller.send(Message(Kind.PULL, 1, sender=3, body={"text": text}, payload=to_frames([sent])))
    arrived = receive(listener)
    assert arrived is not None, "the question did not arrive"
    identity, frames_of_question = arrived
    assert identity == caller.socket.identity
    question = Message.decode(frames_of_question, epoch=1)
    assert (question.kind, question.sender, question.body) == (Kind.PULL, 3, {"text": text})
    received = torch.zeros_like(sent)
    from_frames(question.payload, [received])
    assert torch.equal(received, sent)
    listener.send(identity, Message(Kind.ANSWER, 1, payload=to_frames([received])))
    answer = receive(caller)
    assert answer is not None, "the answer did not arrive"
    from_frames(Message.decode(answer, epoch=1).payload, [received.zero_()])
    assert torch.equal(received, sent)


def test_a_question_and_its_answer(keys: Keys) -> None:
    with listening(keys) as listener, calling(keys, listener, "a") as one, calling(keys, listener, "b") as other:
        exchange(listener, one)
        exchange(listener, other)
        exchange(listener, one)


def test_two_listeners_in_a_process(keys: Keys) -> None:
    with listening(keys) as first, listening(Keys.generate()) as strange, listening(keys) as second:
        assert len({first.endpoint, second.endpoint, strange.endpoint}) == 3
        with calling(keys, first) as one, calling(keys, second) as other:
            exchange(first, one)
            exchange(second, other)
            assert receive(strange, within_s=0) is None
        first.close()
        with calling(keys, second, "again") as caller:
            exchange(second, caller)


def strange_socket(
    context: zmq.Context[Any], endpoint: str, keys: Keys | None, *, client: Keys | None
) -> zmq.Socket[Any]:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if keys is not None and client is not None:
        dealer.curve_serverkey = keys.server_public
        dealer.curve_publickey, dealer.curve_secretkey = client.client_public, client.client_secret
    dealer.connect(endpoint)
    return dealer


@pytest.mark.parametrize(
    "stranger", ["no keys", "another client's key", "another server's key", "the server's key alone"]
)
def test_a_stranger_gets_nothing_in_or_out(keys: Keys, stranger: str) -> None:
    other = Keys.generate()
    server, client = {
        "no keys": (None, None),
        "another client's key": (keys, other),
        "another server's key": (other, keys),
        "the server's key alone": (keys, Keys(keys.server_public, b"", *zmq.curve_keypair())),
    }[stranger]
    with (
        listening(keys) as listener,
        calling(keys, listener) as friend,
        zmq.Context() as context,
        strange_socket(context, listener.endpoint, server, client=client) as dealer,
    ):
        # A dealer that was turned away already has nowhere to send to, and would wait for ever.
        with suppress(zmq.Again):
            dealer.send_multipart([bytes(part) for part in Message(Kind.ABORT, 1).encode()], zmq.DONTWAIT)
        assert receive(listener, within_s=SILENCE_S) is None
        exchange(listener, friend)
        assert receive(listener, within_s=0) is None
        assert not dealer.poll(0)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "greeting": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(60),
    "curve greeting": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x04\xc8\x05HELLO" + bytes(194),
    "huge frame": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x06\x7f" + b"\xff" * 7,
    "silence": b"",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_at_the_port_disturbs_nobody(keys: Keys, name: str) -> None:
    with listening(keys) as listener, calling(keys, listener) as friend:
        exchange(listener, friend)
        port = int(listener.endpoint.rsplit(":", 1)[1])
        intruders = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        try:
            for intruder in intruders:
                intruder.sendall(GARBAGE[name])
            assert receive(listener, within_s=SILENCE_S / 3) is None
            exchange(listener, friend)
            with calling(keys, listener, "late") as late:
                exchange(listener, late)
        finally:
            for intruder in intruders:
                intruder.close()
        exchange(listener, friend)


def test_a_caller_of_another_programs_port_goes_on(keys: Keys) -> None:
    """ZeroMQ gives such a connection up, and would keep waiting to send."""
    greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with closing(Caller(keys, endpoint=endpoint, identity="worker-0")) as caller:
            connection, _ = other.accept()
            with connection:
                connection.sendall(greeting)
                assert caller.broken.poll(int(WITHIN_S * 1000))
                for _ in range(3):
                    caller.send(Message(Kind.PULL, 1))
                    time.sleep(0.01)
                assert not caller.settle(within_s=SILENCE_S)


def test_a_second_caller_of_a_name_does_not_take_the_firsts_place(keys: Keys) -> None:
    with listening(keys) as listener, calling(keys, listener, "a") as first:
        exchange(listener, first)
        with calling(keys, listener, "a") as second:
            second.send(Message(Kind.PULL, 1))
            assert receive(listener, within_s=SILENCE_S) is None
            exchange(listener, first)


def test_who_calls_anew_is_heard_when_the_first_has_ended(keys: Keys) -> None:
    with listening(keys) as listener, calling(keys, listener, "a") as first:
        exchange(listener, first)
        with closing(Caller(keys, endpoint=listener.endpoint, identity="a", is_anew=True)) as second:
            second.send(Message(Kind.PULL, 1))
            assert receive(listener, within_s=SILENCE_S) is None
            first.close()
            until_s = time.monotonic() + WITHIN_S
            while (arrived := receive(listener, within_s=SILENCE_S)) is None and time.monotonic() < until_s:
                assert second.receive() is None
            assert arrived is not None


@pytest.mark.skipif(bool(connections.lack()), reason=connections.lack())
def test_what_a_broken_connection_loses_comes_again(keys: Keys) -> None:
    """The connection is cut again and again while both ends send; each message comes once, and in order."""
    num_messages, payload = 30, [bytes(200_000)]
    with listening(keys) as listener, calling(keys, listener) as caller:
        exchange(listener, caller)
        num_sent = 0
        asked: list[int] = []
        answered: list[int] = []
        until_s = time.monotonic() + WITHIN_S
        while len(answered) < num_messages and time.monotonic() < until_s:
            if num_sent == len(answered):
                for _ in range(6):
                    caller.send(Message(Kind.PULL, 1, clock=num_sent, payload=payload))
                    num_sent += 1
                time.sleep(0.001 * (num_sent % 5))
                cut(listener)
            if (arrived := receive(listener, within_s=0)) is not None:
                asked.append(Message.decode(arrived[1], epoch=1).clock)
                listener.send(arrived[0], Message(Kind.ANSWER, 1, clock=asked[-1], payload=payload))
            if (answer := receive(caller, within_s=0)) is not None:
                answered.append(Message.decode(answer, epoch=1).clock)
        assert asked == answered == list(range(num_messages))
        caller.send(Message(Kind.GOODBYE, 1))
        cut(listener)
        goodbye = threading.Thread(target=caller.settle, kwargs={"within_s": WITHIN_S})
        goodbye.start()
        assert receive(listener) is not None
        while goodbye.is_alive():  # it wants word that the message is there
            receive(listener, within_s=0)


def ends_of(listener: Listener) -> list[tuple[connections.Address, connections.Address]]:
    port = int(listener.endpoint.rsplit(":", 1)[1])
    return [ends for ends in connections.own_connections() if port in (ends[0][1], ends[1][1])]


def cut(listener: Listener) -> None:
    connections.cut(ends_of(listener))


def test_nobody_connects_anew_because_a_listener_is_busy(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked what has arrived, and says so once it has the time; the connection stays as it is."""
    monkeypatch.setattr(wire, "AGAIN_S", 0.02)
    with listening(keys) as listener, calling(keys, listener) as caller:
        exchange(listener, caller)
        caller.send(Message(Kind.GOODBYE, 1))
        before = ends_of(listener)
        settling = threading.Thread(target=caller.settle, kwargs={"within_s": WITHIN_S})
        settling.start()
        time.sleep(SILENCE_S)
        assert sorted(ends_of(listener)) == sorted(before)
        assert receive(listener) is not None
        while settling.is_alive():
            assert receive(listener, within_s=0) is None


def test_patience_with_a_listener_that_is_gone_has_a_bound(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "AGAIN_S", 0.001)
    monkeypatch.setattr(wire, "_MOST_PATIENCE_S", 0.004)
    with listening(keys) as listener, calling(keys, listener) as caller:
        exchange(listener, caller)
        listener.close()
        assert caller.broken.poll(int(WITHIN_S * 1000))
        for _ in range(50):
            assert caller.receive() is None
            time.sleep(0.002)
        assert caller._patience_s == 0.004


def test_nothing_is_kept_for_one_who_is_forgotten(keys: Keys) -> None:
    """Nor is what it has sent lost, which may still be on its way."""
    with listening(keys) as listener, calling(keys, listener, "a") as caller:
        exchange(listener, caller)
        delivery = listener._deliveries[b"a"]
        assert not delivery.is_settled
        listener.forget(b"a")
        listener.forget(b"nobody")
        listener.send(b"a", Message(Kind.OK, 1))
        assert delivery.is_settled
        caller.send(Message(Kind.RECORDS, 1))
        assert receive(listener) is not None


@pytest.mark.skipif(shutil.which("ss") is None, reason="iproute2's ss is not there")
def test_the_kernel_asks_both_ends_whether_the_other_is_there(keys: Keys) -> None:
    with listening(keys) as listener, calling(keys, listener) as caller:
        exchange(listener, caller)
        port = listener.endpoint.rsplit(":", 1)[1]
        for end in ("sport", "dport"):
            asked = ["ss", "--tcp", "--numeric", "--options", "state", "established", f"( {end} = :{port} )"]
            said = partial(subprocess.check_output, asked, text=True)
            assert wait_until(lambda said=said: "timer:(keepalive," in said(), within_s=WITHIN_S), said()


def test_keys_differ_and_secrets_are_not_shown() -> None:
    one, other = Keys.generate(), Keys.generate()
    assert len({*vars(one).values(), *vars(other).values()}) == 8
    assert one.server_secret.decode() not in repr(one)
    assert one.client_secret.decode() not in repr(one)


def test_closing_twice_and_leaving_nothing(keys: Keys) -> None:
    before = running()
    listener = Listener(keys, host="127.0.0.1")
    caller = Caller(keys, endpoint=listener.endpoint, identity="a")
    exchange(listener, caller)
    for _ in range(2):
        caller.close()
        listener.close()
    assert not started_since(before)


def test_what_was_sent_leaves_before_a_lingering_close(keys: Keys) -> None:
    with listening(keys) as listener:
        caller = Caller(keys, endpoint=listener.endpoint, identity="a")
        caller.send(Message(Kind.RECORDS, 1, body={"last": True}))
        caller.close(linger_s=WITHIN_S)
        arrived = receive(listener)
        assert arrived is not None
        assert Message.decode(arrived[1], epoch=1).body == {"last": True}


def test_a_listener_that_cannot_listen_leaves_no_thread(keys: Keys) -> None:
    before = running()
    with pytest.raises(zmq.ZMQError):
        Listener(keys, host="203.0.113.1")  # a documentation address (RFC 5737), which no machine has
    assert not started_since(before)


def test_listening_on_ipv6(keys: Keys) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listening(keys, "::1") as listener, calling(keys, listener) as caller:
        assert listener.endpoint.startswith("tcp://[::1]:")
        exchange(listener, caller)
