"""A worker dies between any two messages, or is taken for dead and lives on: what it has pushed counts on all servers
or on none, and nobody waits for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic import Done
from paceline.membership import Membership
from paceline.messages import Message
from paceline.server import client_core, server_core
from paceline.server.actions import Action, Send, Updated
from paceline.server.admission import Decisions
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.dividing import joined
from paceline.server.tables.spec import RowGradients
from paceline.server.whole_pushes import what_counts
from tests.unit.one_table import NUM_ROWS, spec_of
from tests.unit.protocol_net import EPOCH, LR, RULES, Net, gradient, train

STEPS = 4
TABLE = spec_of(f"sgd:lr={LR}", std=0.0)


class RowsNet(Net):
    """Each push has gradients of rows as well, with the values that those of parameters have."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.next: dict[int, Callable[[], None]] = {}  # by worker whose gradients of rows are on their way
        super().__init__(*given, **named)
        about = {"epoch": EPOCH, "num_servers": len(self.servers)}
        self.tables = [TableClient([TABLE], rank=rank, **about) for rank in range(len(self.clients))]
        self.talks[0] = self.tables[0]
        self.ask(0, self.tables[0].open())
        self.run()
        del self.talks[0]

    def push(self, worker: int, value: float, **push: Any) -> None:
        rows, clock = torch.arange(NUM_ROWS), self.clients[worker].clock
        gradients = RowGradients(rows, torch.full((NUM_ROWS, TABLE.dim), value, dtype=TABLE.dtype))
        assert self.clients[worker].rows_come_along == (len(self.servers) == 1)
        if self.clients[worker].rows_come_along:
            self.clients[worker].take_along(self.tables[worker].parts([gradients], weight=1.0))
            super().push(worker, value, **push)
            return
        self.talks[worker] = self.tables[worker]
        self.next[worker] = partial(super().push, worker, value, **push)
        self.ask(worker, self.tables[worker].push([gradients], weight=1.0, clock=clock))

    def deliver(self, way: tuple[bool, int, int], message: Message) -> None:
        super().deliver(way, message)
        is_request, worker, _ = way
        if not is_request and worker in self.next and self.tables[worker].is_done:
            self.tables[worker].require_done()
            del self.talks[worker]
            self.next.pop(worker)()

    def is_idle(self, worker: int) -> bool:
        return worker not in self.next and super().is_idle(worker)

    def rows(self) -> set[float]:
        state = joined([server.tables._tables[0].state() for server in self.servers])
        assert state["keys"].tolist() in (list(range(NUM_ROWS)), [])
        return {round(float(value), 4) for value in state["rows"].reshape(-1)}


def require_equal_everywhere(net: Net) -> None:
    """All parts of each gradient count, those of rows among them, or none does."""
    net.ask(0, net.clients[0].pull())
    net.run()
    assert not net.errors
    values = {round(float(value), 4) for tensor in net.views(0) for value in tensor.reshape(-1)}
    assert len(values) == 1
    assert not isinstance(net, RowsNet) or net.rows() in (values, set())
    assert not isinstance(net, RowsNet) or net.rows() or values == {0.0}


KINDS = st.sampled_from([Net, RowsNet])


def act(net: Net, server: int, actions: Iterable[Action], *, dead: int | None = None) -> None:
    for action in actions:
        if isinstance(action, Send) and action.to != dead:
            net._put(False, action.to, server, action.message)
        elif isinstance(action, Updated):
            net.records += action.records


def lose_some(net: Net, dead: int, randomness: random.Random) -> None:
    """The worker is dead: nothing comes to it, and of what it has sent to each server the last part does not come."""
    for way, queue in net.under_way.items():
        is_request, worker, _ = way
        if worker == dead:
            for _ in range(randomness.randint(0, len(queue)) if is_request else len(queue)):
                queue.pop()


def letting_go(net: Net, dead: int) -> Generator[None, None, Done]:
    """As the launcher does, one server after another. Returns how far the worker was."""
    said = []
    for server in net.servers:
        said.append(server.attendance.part_with(dead))
        yield
    counts = what_counts(said)
    decided: Decisions = {}
    for index, server in enumerate(net.servers):
        act(net, index, server.attendance.let_go(dead, counts, net.now_s, decided=decided), dead=dead)
        decided = decided or dict(server.attendance.decided)
        yield
    for way in [way for way in net.under_way if way[1] == dead]:
        del net.under_way[way]
    return Done() if counts is None else Done(*counts.body["done"])


@pytest.mark.parametrize("name", ["bsp", "ssp", "asp"])
@given(
    randomness=st.integers(0, 2**32).map(random.Random),
    num_workers=st.integers(2, 3),
    num_servers=st.integers(1, 3),
    near=st.sampled_from([0.0, 0.5, 1.0]),
    dies_after=st.integers(0, 60),
    lives_on=st.booleans(),
    kind=KINDS,
)
def test_gradients_count_whole(
    name: str,
    randomness: random.Random,
    num_workers: int,
    num_servers: int,
    near: float,
    dies_after: int,
    lives_on: bool,
    kind: type[Net],
) -> None:
    members = Membership.first(num_workers)
    beside = [[randomness.random() < near for _ in range(num_servers)] for _ in range(num_workers)]
    rules = (RULES[name](members) for _ in range(num_servers))
    net = kind(rules, beside, randomness=randomness, piece_bytes=64, outlives_workers=True)
    dead, done = num_workers - 1, Done()
    steps, is_asking = [0] * num_workers, [False] * num_workers
    living, acting = set(range(num_workers)), set(range(num_workers))
    launcher: Generator[None, None, Done] | None = None
    num_delivered = 0

    def go_on() -> None:
        for worker in acting:
            client = net.clients[worker]
            if is_asking[worker] and net.is_idle(worker):
                client.require_done()
                client.reply()
                is_asking[worker], steps[worker] = False, steps[worker] + 1
            if not is_asking[worker] and steps[worker] < STEPS:
                net.push(worker, gradient(worker, steps[worker]), done=Done(0, steps[worker] + 1))
                is_asking[worker] = True

    go_on()
    while True:
        if dead in living and num_delivered == dies_after:
            living.discard(dead)
            launcher = letting_go(net, dead)
            if not lives_on:
                acting.discard(dead)
                lose_some(net, dead, randomness)
        ways: list[tuple[bool, int, int] | None] = [way for way, queue in net.under_way.items() if queue]
        ways += [None] if launcher is not None else []
        if not ways:
            break
        way = randomness.choice(ways)
        if way is not None:
            net.deliver(way, Message.decode(net.under_way[way].popleft(), epoch=EPOCH))
            num_delivered += 1
        elif launcher is not None:
            try:
                next(launcher)
            except StopIteration as end:
                launcher, done = None, end.value
                acting.discard(dead)
        go_on()
    assert all(steps[worker] == STEPS for worker in living)
    counted = [{(each.worker, each.clock) for each in net.records if each.server == s} for s in range(num_servers)]
    assert all(each == counted[0] for each in counted)
    if dead not in living:
        assert {clock for worker, clock in counted[0] if worker == dead} == set(range(done.own))
    require_equal_everywhere(net)


@pytest.mark.parametrize("name", ["bsp", "ssp", "asp"])
@given(
    randomness=st.integers(0, 2**32).map(random.Random),
    num_workers=st.integers(1, 3),
    num_servers=st.integers(1, 3),
    near=st.sampled_from([0.0, 0.5, 1.0]),
    joins_after=st.integers(0, 30),
    kind=KINDS,
)
def test_whoever_joins_is_in_the_same_updates_on_all_servers(
    name: str,
    randomness: random.Random,
    num_workers: int,
    num_servers: int,
    near: float,
    joins_after: int,
    kind: type[Net],
) -> None:
    """Between any two messages, the servers one after another."""
    joiner = num_workers
    rules = (RULES[name](Membership.first(num_workers)) for _ in range(num_servers))
    beside = [[randomness.random() < near for _ in range(num_servers)] for _ in range(num_workers + 1)]
    net = kind(rules, beside, randomness=randomness, piece_bytes=64, outlives_workers=True)
    steps, asked = [0] * (num_workers + 1), [""] * (num_workers + 1)
    members, num_delivered, clocks = list(range(num_workers)), 0, list[int]()
    begins, told = -1, 0

    def go_on() -> None:
        for worker in members:
            client = net.clients[worker]
            if asked[worker] == "leave" or (asked[worker] and not net.is_idle(worker)):
                continue
            if asked[worker]:
                client.require_done()
                assert client.reply().admitted
                steps[worker] += asked[worker] == "push"
            asked[worker] = "push" if steps[worker] < STEPS else "leave"
            if asked[worker] == "push":
                net.push(worker, gradient(worker, steps[worker]))
            else:
                net.ask(worker, client.leave())

    go_on()
    while True:
        if num_delivered >= joins_after and len(clocks) < num_servers:
            clocks.append(net.servers[len(clocks)].attendance.expect(joiner))
        elif len(clocks) == num_servers and told < num_servers:
            act(net, told, net.servers[told].attendance.let_in(joiner, max(clocks), 0.0))
            told += 1
            if told == num_servers:
                net.ask(joiner, net.clients[joiner].wait(pause_at=2**60))
                members.append(joiner)
                asked[joiner], begins = "wait", max(clocks)
        go_on()
        ways = [way for way, queue in net.under_way.items() if queue]
        if not ways and told == num_servers:
            break
        if ways:
            way = randomness.choice(ways)
            net.deliver(way, Message.decode(net.under_way[way].popleft(), epoch=EPOCH))
        num_delivered += 1
    assert steps == [STEPS] * (num_workers + 1)
    counted = [{(each.worker, each.clock) for each in net.records if each.server == s} for s in range(num_servers)]
    assert all(each == counted[0] for each in counted)
    assert {clock for worker, clock in counted[0] if worker == joiner} == set(range(begins, begins + STEPS))
    require_equal_everywhere(net)


def test_pieces_that_count_whole_do_not_wait_for_each_others_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do where only a few are under way."""
    for module in (client_core, server_core):
        monkeypatch.setattr(module, "FRAME_BYTES", 16)
    rules = [RULES["bsp"](Membership.first(2)) for _ in range(2)]
    beside = [[True, False], [False, False]]
    net = Net(rules, beside, randomness=random.Random(0), piece_bytes=16, outlives_workers=True)
    assert train(net, 3) == [3, 3]
    assert not net.errors
