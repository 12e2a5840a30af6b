"""Both ends of the protocol, with messages between them that arrive in any order, except those of one pair."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.aggregate import WeightedMean
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.messages import ALL_SHARDS, HEAD_BYTES, IN_TURN, STOP, VOID, Kind, Message
from paceline.server import client_core, server_core
from paceline.server.actions import Action, BesideNext, Send, Updated
from paceline.server.admission import BulkSynchronous, StaleSynchronous
from paceline.server.spec import Push
from tests.unit.protocol_net import EPOCH, FOREVER, LR, RULES, Net, gradient, train


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40)
@given(
    randomness=st.integers(0, 2**32).map(random.Random),
    num_workers=st.integers(2, 4),
    num_servers=st.integers(1, 3),
    piece_bytes=st.sampled_from([64, 1024]),
)
def test_any_order_of_messages_gives_the_naive_servers_model(
    name: str, randomness: random.Random, num_workers: int, num_servers: int, piece_bytes: int
) -> None:
    members = Membership.first(num_workers)
    beside = [[randomness.random() < 0.4 for _ in range(num_servers)] for _ in range(num_workers)]
    rule = RULES[name]
    net = Net((rule(members) for _ in range(num_servers)), beside, randomness=randomness, piece_bytes=piece_bytes)
    num_steps = 4
    steps = train(net, num_steps)
    if name == "backup":  # a late worker has others' clocks to wait for: the last to end are never all answered
        assert max(steps) == num_steps
    else:
        assert steps == [num_steps] * num_workers, "somebody waits for ever"
    for worker in range(num_workers):
        net.ask(worker, net.clients[worker].pull())
    net.run()
    model = torch.cat([tensor.double().reshape(-1) for tensor in net.views(0)])
    assert not net.errors
    if name == "bsp":
        means = [sum(gradient(w, c) for w in range(num_workers)) / num_workers for c in range(num_steps)]
        assert model == pytest.approx(-LR * sum(means), rel=1e-5)
    elif name in ("backup", "quorum"):
        told = [[(r.iteration, r.worker, r.clock) for r in net.records if r.server == s] for s in range(num_servers)]
        shortest = min(map(len, told))
        assert all(one[:shortest] == told[0][:shortest] for one in told), "servers count the same gradients"
    if name not in ("bsp", "backup"):
        total = sum(gradient(w, c) for w in range(num_workers) for c in range(num_steps))
        assert model == pytest.approx(-LR * total, rel=1e-5)


@pytest.mark.parametrize("name", ["backup", "quorum"])
@settings(max_examples=40)
@given(
    randomness=st.integers(0, 2**32).map(random.Random),
    num_workers=st.integers(2, 4),
    num_servers=st.integers(1, 3),
)
def test_all_meet_where_servers_take_first_comers(
    name: str, randomness: random.Random, num_workers: int, num_servers: int
) -> None:
    """In any order of messages each comes to its place, and every shard has made its updates of the same gradients."""
    members = Membership.first(num_workers)
    beside = [[randomness.random() < 0.4 for _ in range(num_servers)] for _ in range(num_workers)]
    net = Net((RULES[name](members) for _ in range(num_servers)), beside, randomness=randomness, piece_bytes=64)
    num_steps = 3
    for _ in range(2):
        assert train(net, num_steps, meets=True) == [num_steps + 1] * num_workers, "somebody waits for ever"
        for worker, client in enumerate(net.clients):
            net.ask(worker, client.come_back())
        net.run()
        for worker, client in enumerate(net.clients if name == "backup" else ()):
            net.ask(worker, client.wait(pause_at=FOREVER))
            net.run()
            assert client.reply().admitted
    net.ask(0, net.clients[0].pull())
    net.run()
    assert not net.errors
    model = torch.cat([tensor.double().reshape(-1) for tensor in net.views(0)])
    assert model == pytest.approx(float(model[0]), rel=1e-5)
    num_updates = net.servers[0].iteration
    if name == "backup":
        assert num_updates >= 2 * num_steps, "as many as the first worker takes steps"
    else:
        total = 2 * sum(gradient(w, c) for w in range(num_workers) for c in range(num_steps))
        assert float(model[0]) == pytest.approx(-LR * total, rel=1e-5)


_HARMLESS = (Kind.ATTACH, Kind.LEAVE, Kind.PULL, Kind.HOW_FAR, Kind.GET_STATE)


@given(
    kind=st.sampled_from([k for k in Kind if k not in _HARMLESS]),
    flags=st.sampled_from([0, VOID, STOP, VOID | STOP]),
    shard=st.sampled_from([ALL_SHARDS, -2, 0, 3, 1000]),
    clock=st.sampled_from([-1, 0, 1, 5]),
    body=st.fixed_dictionaries(
        {},
        optional={
            "sender": st.sampled_from([0, 9, -1, "x", None, [], 1.5]),
            "weight": st.sampled_from([0, -1.0, "1", None, float("inf"), 2]),
            "kind": st.sampled_from(["delta", "x", [], None]),
            "groups": st.sampled_from([[], {}, [{}], [{"params": []}], None, 3]),
            "contributors": st.sampled_from([[0, 1], 3, None]),
            "goes_on_at": st.integers(-1, 2),
        },
    ),
    payload=st.lists(st.binary(max_size=70), max_size=2),
    sender=st.sampled_from([7, 2]),
)
def test_a_strangers_message_gives_an_error_to_it_alone(sender: int, kind: Kind, **fields: Any) -> None:
    """Worker 7 has never attached; worker 2 has, but is no member."""
    members = Membership.first(2)
    net = Net([BulkSynchronous(members)], [[True], [False], [False]], randomness=random.Random(0), piece_bytes=64)
    if sender == 2 and kind in (Kind.INITIALISE, Kind.SET_STATE):
        return
    net.push(0, 1.0)
    net.run()
    actions = list(net.servers[0].receive(Message(kind, EPOCH, sender=sender, **fields), 0.0))
    assert [(type(action), action.to, action.message.kind) for action in actions if isinstance(action, Send)] == [
        (Send, sender, Kind.ERROR)
    ]
    assert len(actions) == 1
    net.push(1, 3.0)
    net.run()
    assert all(client.is_done and client.reply().iteration == 1 for client in net.clients[:2])
    assert all(tensor.tolist() == [-LR * 2.0] * len(tensor) for tensor in net.views(0))


def test_workers_elsewhere_are_answered_before_the_one_beside() -> None:
    """Whoever asked first; and what says so lies between."""
    net = Net(
        [BulkSynchronous(Membership.first(3))],
        [[True], [False], [False]],
        randomness=random.Random(0),
        piece_bytes=4096,
    )
    actions: list[Action] = []
    receive = net.servers[0].receive
    net.servers[0].receive = lambda message, now_s: [actions.append(a) or a for a in receive(message, now_s)]  # type: ignore[method-assign,misc,return-value,func-returns-value,assignment]
    for worker in range(3):
        net.push(worker, 1.0)
        net.run()
    last = [action.to if isinstance(action, Send) else type(action) for action in actions[-5:]]
    assert last == [Updated, 1, 2, BesideNext, 0]


def test_bytes_are_those_of_the_messages() -> None:
    for beside in (True, False):
        net = Net([BulkSynchronous(Membership.first(1))], [[beside]], randomness=random.Random(0), piece_bytes=64)
        net.bytes.clear()
        net.push(0, 1.0)
        net.run()
        num_pieces = sum(len(part.pieces) for part in net.servers[0].parts)
        num_messages = 2 if beside else 2 * num_pieces
        # Padding at the end of a segment passes too, as it always did.
        owned = sum(part.tensor_bytes for part in net.servers[0].parts)
        assert net.clients[0].moved_bytes == net.bytes[0] == num_messages * HEAD_BYTES + 2 * owned
        net.push(0, 1.0, void=True)
        net.run()
        assert net.clients[0].moved_bytes == (2 if beside else 1 + num_pieces) * HEAD_BYTES + owned


def test_answers_go_a_few_at_a_time_where_only_some_hosts_have_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all get there."""
    for module in (client_core, server_core):
        monkeypatch.setattr(module, "FRAME_BYTES", 64)
    for beside, is_in_turn in (([[True, False], [False, False]], True), ([[True, False], [False, True]], False)):
        rules = [BulkSynchronous(Membership.first(2)) for _ in range(2)]
        net = Net(rules, beside, randomness=random.Random(0), piece_bytes=16)
        flags = list[int]()
        put = net._put
        net._put = lambda *sent, put=put, flags=flags: flags.append(sent[-1].flags) or put(*sent)  # type: ignore[method-assign,misc]
        assert train(net, 3) == [3, 3]
        assert any(each & IN_TURN for each in flags) == is_in_turn


def test_who_has_left_may_still_pull() -> None:
    net = Net([BulkSynchronous(Membership.first(2))], [[True], [False]], randomness=random.Random(0), piece_bytes=64)
    net.ask(1, net.clients[1].leave())
    net.run()
    for value in (2.0, 4.0):
        net.push(0, value)
        net.run()
        assert net.clients[0].reply().admitted
    net.ask(1, net.clients[1].pull())
    net.run()
    assert net.clients[1].iteration == 2
    assert set(net.views(1)[0].tolist()) == {-LR * 6.0}


def test_a_worker_goes_on_when_every_server_has_admitted_it() -> None:
    """The second one answers it for its pause alone: the slower worker's push is still on its way there."""
    rule = StaleSynchronous(Membership.first(2), staleness=0)
    rules = [rule, rule.for_another_shard()]
    net = Net(rules, [[True, True]] * 2, randomness=random.Random(0), piece_bytes=4096)
    net.ask(1, net.clients[1].exchange(Push(pause_at=1)))
    late = net.under_way.pop((True, 1, 1))
    net.run()
    net.ask(0, net.clients[0].exchange(Push(pause_at=1)))
    net.run()
    assert net.clients[0].is_done
    assert not net.clients[0].reply().admitted
    net.under_way[True, 1, 1] = late
    net.ask(0, net.clients[0].wait(pause_at=FOREVER))
    net.run()
    assert net.clients[0].reply().admitted


def test_state_that_cannot_be_read_is_refused() -> None:
    net = Net([BulkSynchronous(Membership.first(1))], [[False]], randomness=random.Random(0), piece_bytes=64)
    for tensors in (3, [["0.x", "torch.float31", [2]]], [["0.x", "torch.float32", [-2]]], [["0.x"]], [[[], "y", "z"]]):
        message = Message(Kind.SET_STATE, EPOCH, body={"tensors": tensors})
        (action,) = net.servers[0].receive(message, 0.0)
        assert isinstance(action, Send)
        assert "refused an optimizer state that cannot be read" in action.message.body["error"]


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, RuntimeError, UsageError])
def test_a_servers_own_trouble_ends_it_and_is_told_to_nobody_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net([BulkSynchronous(Membership.first(2))], [[True], [False]], randomness=random.Random(0), piece_bytes=64)

    def fail(*_: object) -> None:
        raise error("these cannot be joined")

    monkeypatch.setattr(WeightedMean, "aggregate", fail)
    net.push(0, 1.0)
    net.run()
    net.push(1, 1.0)
    with pytest.raises(error, match="these cannot be joined"):
        net.run()
    assert not net.errors


@pytest.mark.parametrize(
    "body",
    [
        {"sender": "x"},
        {"sender": []},
        {"sender": None},
        {"weight": 0},
        {"weight": "1"},
        {"kind": []},
        {"groups": []},
        {"groups": None},
        {"groups": [{}, {}]},
        {"groups": [3]},
        {"contributors": 3, "goes_on_at": 1},
        {"contributors": [0]},
        {"contributors": [[]], "goes_on_at": 1},
        {"contributors": [0], "goes_on_at": "1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("follows", [False, True])
def test_a_members_malformed_field_is_refused_at_most(body: dict[str, Any], follows: bool) -> None:
    """None ends the server."""
    rule = BulkSynchronous(Membership.first(2), backup_workers=int(follows))
    net = Net(
        [rule, rule.for_another_shard()], [[True, True], [False, False]], randomness=random.Random(0), piece_bytes=64
    )
    for kind in (Kind.EXCHANGE, Kind.FOLLOW):
        for server in net.servers:
            actions = list(server.receive(Message(kind, EPOCH, sender=0, body=body), 0.0))
            assert {a.message.kind for a in actions if isinstance(a, Send)} <= {Kind.ERROR, Kind.ANSWER}


def test_who_leaves_owes_no_word_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (client_core, server_core):
        monkeypatch.setattr(module, "FRAME_BYTES", 64)
    members = Membership.first(3)
    beside = [[True, False], [False, False], [False, False]]
    rules = [BulkSynchronous(members) for _ in range(2)]
    net = Net(rules, beside, randomness=random.Random(0), piece_bytes=16)
    put = net._put
    # Worker 1 never says that an answer has come.
    net._put = lambda *sent: put(*sent) if (sent[1], sent[-1].kind) != (1, Kind.RECEIVED) else None  # type: ignore[method-assign]
    num_rounds = 0
    while all(client.is_done for client in net.clients):
        assert num_rounds < 10
        for worker, client in enumerate(net.clients):
            if num_rounds:
                client.reply()
            net.push(worker, 1.0)
        net.run()
        num_rounds += 1
    net.ask(1, [Send(server, Message(Kind.LEAVE, EPOCH, sender=1)) for server in range(2)])
    net.run()
    for number in range(num_rounds, num_rounds + 3):
        for worker in (0, 2):
            assert net.clients[worker].is_done
            assert net.clients[worker].reply().iteration == number
            net.push(worker, 2.0)
        net.run()
