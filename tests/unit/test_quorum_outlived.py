"""Rounds of a quorum on several servers, while workers die, are taken for dead and live on, join and leave between any
two messages: all shards make the same rounds, what somebody has pushed counts in one of them or, of the dead, in none,
and nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Generator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.elastic import Done
from paceline.membership import Membership
from paceline.messages import Message
from paceline.server.admission import Quorum
from tests.unit.protocol_net import EPOCH, FOREVER, LR, Net, gradient
from tests.unit.test_outlived_by_servers import act, letting_go, lose_some

MOST = 6
Turns = Generator[None, None, None]


def letting_in(net: Net, joiner: int) -> Turns:
    """As the launcher does, one server after another."""
    clocks = []
    for server in net.servers:
        clocks.append(server.attendance.expect(joiner))
        yield
    for index, server in enumerate(net.servers):
        act(net, index, server.attendance.let_in(joiner, max(clocks), net.now_s))
        yield


class Campaign:
    """
    Args:
        near: the share of servers that are on a worker's host.
        pause_every: all meet after so many rounds.
    """

    def __init__(
        self,
        randomness: random.Random,
        *,
        workers: int,
        quorum: int,
        grace_s: float,
        servers: int,
        near: float,
        pause_every: int,
    ) -> None:
        beside = [[randomness.random() < near for _ in range(servers)] for _ in range(MOST)]
        rules = (Quorum(Membership.first(workers), quorum=quorum, grace_s=grace_s) for _ in range(servers))
        self.net = Net(rules, beside, randomness=randomness, piece_bytes=64, outlives_workers=True)
        self.random, self.next = randomness, workers
        self.pause_at = self.pause_every = pause_every
        self.living, self.acting = set(range(workers)), set(range(workers))
        self.asked = dict.fromkeys(range(workers), "")
        self.waiting: set[int] = set()  # for admission, when the pause is over
        self.wanted = [randomness.randint(0, 5) for _ in range(MOST)]  # steps
        self.steps: Counter[int] = Counter()
        self.pushed: dict[tuple[int, int], float] = {}  # by worker and clock
        self.done: dict[int, Done] = {}  # of the dead
        self.errands: list[Turns] = []  # the launcher's

    def die(self, *, lives_on: bool) -> None:
        """One of several."""
        among = sorted(self.living & self.acting)
        if len(among) < 2:
            return
        dead = self.random.choice(among)
        self.living.discard(dead)
        if not lives_on:
            self.acting.discard(dead)
            lose_some(self.net, dead, self.random)
        self.errands.append(self._letting_go(dead))

    def _letting_go(self, dead: int) -> Turns:
        self.done[dead] = yield from letting_go(self.net, dead)
        self.acting.discard(dead)

    def join(self) -> None:
        if self.next < MOST and any(self.asked[worker] != "left" for worker in self.living):
            self.errands.append(self._letting_in(self.next))
            self.next += 1

    def _letting_in(self, joiner: int) -> Turns:
        yield from letting_in(self.net, joiner)
        self.living.add(joiner)
        self.acting.add(joiner)
        self._wait(joiner)

    def _wait(self, worker: int) -> None:
        self.net.ask(worker, self.net.clients[worker].wait(pause_at=self.pause_at))
        self.asked[worker] = "wait"

    def go_on(self) -> None:
        for worker in sorted(self.acting):
            self._go_on(worker)
        if all(self.asked[worker] in ("pause", "left") for worker in self.living) and not self.errands:
            self.pause_at += self.pause_every
            for worker in sorted(self.acting):
                if self.asked[worker] == "pause":
                    self.asked[worker] = ""
                    self._go_on(worker)

    def _go_on(self, worker: int) -> None:
        client = self.net.clients[worker]
        if self.asked[worker] in ("pause", "left") or (self.asked[worker] and not client.is_done):
            return
        if self.asked[worker]:
            client.require_done()
        if self.asked[worker] == "leave":
            self.asked[worker] = "left"
            return
        if self.asked[worker]:
            reply = client.reply()
            self.steps[worker] += self.asked[worker] == "push"
            assert reply.admitted or reply.iteration >= self.pause_at
            if not reply.admitted:
                self.waiting.add(worker)
            if reply.iteration >= self.pause_at:
                self.asked[worker] = "pause"
                return
        if worker in self.waiting:
            self.waiting.discard(worker)
            self._wait(worker)
            return
        step = self.steps[worker]
        if step == self.wanted[worker]:
            self.asked[worker] = "leave"
            self.net.ask(worker, client.leave())
            return
        self.asked[worker] = "push"
        self.pushed[worker, client.clock] = gradient(worker, step)
        self.net.push(worker, gradient(worker, step), pause_at=self.pause_at, done=Done(0, step + 1))

    def turn(self) -> bool:
        """One message more, or one thing that the launcher does. Returns whether there was one."""
        net = self.net
        ways: list[tuple[bool, int, int] | None] = [way for way, queue in net.under_way.items() if queue]
        ways += [None] if self.errands else []
        wakes_at_s = net.servers[0].wakes_at_s
        if not ways and wakes_at_s is None:
            return False
        if not ways or (wakes_at_s is not None and self.random.random() < 0.1):
            assert wakes_at_s is not None
            net.now_s = wakes_at_s
            act(net, 0, net.servers[0].tick(net.now_s))
            self.go_on()
            return True
        way = self.random.choice(ways)
        if way is not None:
            message = Message.decode(net.under_way[way].popleft(), epoch=EPOCH)
            is_request, worker, _ = way
            if is_request or worker in self.acting:
                net.deliver(way, message)
        elif next(self.errands[0], self) is self:
            self.errands.pop(0)
        self.go_on()
        return True

    def require_whole(self) -> None:
        net = self.net
        assert not net.errors
        assert {worker: self.asked[worker] for worker in self.living} == dict.fromkeys(self.living, "left")
        rounds = []
        for index in range(len(net.servers)):
            made = defaultdict(set)
            for record in net.records:
                if record.server == index:
                    assert (record.worker, record.clock) not in made[record.iteration]
                    made[record.iteration].add((record.worker, record.clock))
            rounds.append(dict(made))
        assert all(each == rounds[0] for each in rounds)
        counted = Counter(worker for made in rounds[0].values() for worker, _ in made)
        assert counted == Counter(
            {worker: self.wanted[worker] for worker in self.living if self.wanted[worker]}
            | {worker: done.own for worker, done in self.done.items() if done.own}
        )
        means = [sum(self.pushed[each] for each in made) / len(made) for made in rounds[0].values()]
        reader = min(self.living)
        net.ask(reader, net.clients[reader].pull())
        net.run()
        for tensor in net.views(reader):
            assert tensor.tolist() == pytest.approx([-LR * sum(means)] * len(tensor), rel=1e-5, abs=1e-5)


CHANGES = st.lists(st.tuples(st.integers(0, 90), st.sampled_from(["dies", "lives on", "joins"])), max_size=5)


@settings(max_examples=200, deadline=None)
@given(
    randomness=st.integers(0, 2**32).map(random.Random),
    workers=st.integers(2, 4),
    quorum=st.integers(1, 4),
    grace_s=st.sampled_from([0.0, 1.0]),
    servers=st.integers(1, 3),
    near=st.sampled_from([0.0, 0.5, 1.0]),
    pause_every=st.sampled_from([2, 3, FOREVER]),
    changes=CHANGES,
)
def test_all_servers_make_the_same_rounds_of_whole_changes(
    randomness: random.Random,
    workers: int,
    quorum: int,
    grace_s: float,
    servers: int,
    near: float,
    pause_every: int,
    changes: list[tuple[int, str]],
) -> None:
    campaign = Campaign(
        randomness,
        workers=workers,
        quorum=min(quorum, workers),
        grace_s=grace_s,
        servers=servers,
        near=near,
        pause_every=pause_every,
    )
    campaign.go_on()
    left, number = sorted(changes), 0
    while True:
        while left and left[0][0] <= number:
            _, what = left.pop(0)
            if what == "joins":
                campaign.join()
            else:
                campaign.die(lives_on=what == "lives on")
            campaign.go_on()
        if not campaign.turn():
            break
        number += 1
    campaign.require_whole()


def with_grace(workers: int) -> Net:
    """On two servers elsewhere, with a quorum of two."""
    rules = (Quorum(Membership.first(workers), quorum=2, grace_s=1.0) for _ in range(2))
    beside = [[False, False]] * workers
    return Net(rules, beside, randomness=random.Random(0), piece_bytes=64, outlives_workers=True)


def let_go_at(net: Net, dead: int, now_s: float) -> None:
    net.now_s = now_s
    for _ in letting_go(net, dead):
        pass
    net.run()


def test_grace_begins_with_a_change_that_counts_when_its_worker_is_gone() -> None:
    net = with_grace(3)
    net.push(0, 1.0, done=Done(0, 1))
    net.run()
    net.push(1, 1.0, done=Done(0, 1))
    for way in [way for way, queue in net.under_way.items() if queue]:
        while net.under_way[way]:  # both servers have it, and are not told that it counts
            net.deliver(way, Message.decode(net.under_way[way].popleft(), epoch=EPOCH))
    lose_some(net, 1, random.Random(0))
    let_go_at(net, 1, 5.0)
    assert net.servers[0].wakes_at_s == 6.0
    net.now_s = 6.0
    act(net, 0, net.servers[0].tick(net.now_s))
    net.run()
    assert net.is_idle(0)
    assert [server.iteration for server in net.servers] == [1, 1]
    assert not net.errors


def test_a_worker_is_let_go_when_the_grace_of_its_round_is_over() -> None:
    net = with_grace(3)
    for worker in range(2):
        net.push(worker, 1.0, done=Done(0, 1))
    net.run()
    assert net.servers[0].wakes_at_s == 1.0
    let_go_at(net, 1, 2.0)
    assert net.is_idle(0)
    assert [server.iteration for server in net.servers] == [1, 1]
    assert not net.errors


@pytest.mark.parametrize("leaves_first", [[0], [1], [2], [0, 1], [1, 2], []], ids=str)
@pytest.mark.parametrize("is_let_in_first", [False, True])
def test_one_joins_while_the_last_leaves(leaves_first: list[int], is_let_in_first: bool) -> None:
    """What a dead worker has given waits for one more. Some servers hear that the other one leaves before they hear of
    the joiner, and some after."""
    rules = (Quorum(Membership.first(2), quorum=2) for _ in range(3))
    net = Net(rules, [[False] * 3] * 3, randomness=random.Random(0), piece_bytes=64, outlives_workers=True)
    net.push(1, 1.0, done=Done(0, 1))
    net.run()
    let_go_at(net, 1, 0.0)
    net.ask(0, net.clients[0].leave())
    leaving = dict(net.under_way)
    net.under_way.clear()

    def leaves(servers: list[int]) -> None:
        for way, queue in leaving.items():
            if queue and way[2] in servers:
                net.deliver(way, Message.decode(queue.popleft(), epoch=EPOCH))

    others = [server for server in range(3) if server not in leaves_first]
    leaves(leaves_first)
    turns = letting_in(net, 2)
    for _ in range(3):
        next(turns)
    if not is_let_in_first:
        leaves(others)
    for _ in turns:
        pass
    net.ask(2, net.clients[2].wait(pause_at=FOREVER))
    if is_let_in_first:
        leaves(others)
    net.run()
    assert net.is_idle(2)
    assert net.clients[2].reply().admitted
    net.push(2, 3.0, done=Done(0, 1))
    net.run()
    assert net.is_idle(2)
    assert not net.errors
    made = [[each.worker for each in net.records if each.server == server] for server in range(3)]
    assert made == [made[0]] * 3
    assert sorted(made[0]) == [1, 2]
