"""Workers that serve themselves from lent shards, of whom some die and others come: servers go on without them."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from random import Random
from typing import Any

import pytest
import torch

from paceline.comm.servers.loan import Loan, Version
from paceline.comm.servers.self_service import SelfService
from paceline.elastic.lanes import Done
from paceline.messages import Kind, Message
from paceline.server.actions import Action, Send, Updated
from paceline.server.closing import Applied
from paceline.server.whole_pushes import what_counts
from tests.unit.lent_shards import FOREVER, SGD, Rule, Site, asp, bsp


class Died(Exception):
    """Thrown where a worker is killed."""


@dataclass
class Deaths:
    """Has whoever pushes die at a certain point of its way, counted from when it is set."""

    left: int | None = None

    def pass_by(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Died


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Deaths:
    deaths = Deaths()

    def watch(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watched(*given: Any) -> Any:
            deaths.pass_by()
            result = method(*given)
            deaths.pass_by()
            return result

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (SelfService, "push"),
        (SelfService, "_receive"),
        (Loan, "note"),
        (Loan, "put_in_force"),
        (Version, "copy_"),
        (Version, "pushed"),
        (Version, "counted"),
    ):
        watch(owner, name)
    return deaths


@dataclass
class Net:
    """Workers that train, each by itself, and servers that lend as `Holding` does."""

    site: Site
    chance: Random
    clocks: dict[int, int]
    """Of workers that take part."""
    waiting: set[int] = field(default_factory=set)
    """Have pushed, and wait."""
    asking: dict[int, int] = field(default_factory=dict)
    """By worker that has sent a message: answers to come."""
    applied: list[list[Applied]] = field(default_factory=list)
    """By server, in order."""
    done: dict[int, Done] = field(default_factory=dict)
    """Of workers that are gone."""

    def __post_init__(self) -> None:
        self.applied = [[] for _ in self.site.cores]

    def step(self, worker: int) -> None:
        """The worker does its next thing."""
        if worker in self.asking:
            return
        if worker in self.waiting:
            self._look(worker)
            return
        done = Done(steps=self.clocks[worker] + 1)
        if self.site.workers[worker].push(done):
            self.waiting.add(worker)
            self._look(worker)
        else:
            self._push_by_message(worker)

    def _look(self, worker: int) -> None:
        services = self.site.workers[worker]
        if not services.is_over:
            return
        self.waiting.discard(worker)
        served = services.take()
        if served is None:
            self._push_by_message(worker)
        else:
            assert {each.clock for each in served} == {self.clocks[worker] + 1}
            self.clocks[worker] += 1

    def _push_by_message(self, worker: int) -> None:
        clock = self.clocks[worker]
        body = {"done": list(Done(steps=clock + 1))}
        self.asking[worker] = len(self.site.cores)
        for server in range(len(self.site.cores)):
            self.take_back(server)
            push = Message(Kind.EXCHANGE, 1, sender=worker, clock=clock, pause_at=FOREVER, body=body)
            self.do(server, self.site.cores[server].receive(push, 0.0))
            self.lend(server)

    def do(self, server: int, actions: Iterator[Action]) -> None:
        for action in actions:
            if isinstance(action, Updated):
                records = action.records
                self.applied[server] += [Applied(r.iteration, r.worker, r.clock, r.staleness) for r in records]
            elif isinstance(action, Send):
                assert action.message.kind is Kind.ANSWER, action.message.body
                assert action.message.staleness >= 0, "the push counts"
                if action.to not in self.asking:
                    continue
                self.asking[action.to] -= 1
                if not self.asking[action.to]:
                    del self.asking[action.to]
                    self.clocks[action.to] += 1

    def take_back(self, server: int) -> None:
        core = self.site.cores[server]
        returned = self.site.lendings[server].take_back(core.parts)
        core.intake.served_themselves(returned.counted)
        self.applied[server] += returned.applied

    def lend(self, server: int) -> None:
        core = self.site.cores[server]
        if core.is_quiet:
            gradients = {rank: astuple(self.site.gradients[rank].address) for rank in sorted(core.attendance.active)}
            self.site.lendings[server].lend(core.parts, gradients)

    def die(self, worker: int) -> None:
        """It is gone, and the launcher has servers go on without it, while others go on."""
        del self.clocks[worker]
        self.waiting.discard(worker)
        self.asking.pop(worker, None)
        cores = self.site.cores
        said = []
        for server, core in enumerate(cores):
            self.go_on()
            self.take_back(server)
            said.append(core.attendance.part_with(worker))
        self.go_on()
        assert not self.site.workers[worker].push(Done()), "one that was only taken for dead has no part in it"
        counts = what_counts(said)
        self.done[worker] = Done(*counts.body["done"]) if counts is not None else Done()
        for server, core in enumerate(cores):
            self.go_on()
            self.take_back(server)
            self.do(server, core.attendance.let_go(worker, counts, 0.0))

    def come(self, worker: int) -> None:
        """A worker that all servers know already takes part from here on."""
        expected = []
        for server, core in enumerate(self.site.cores):
            self.go_on()
            self.take_back(server)
            expected.append(core.attendance.expect(worker))
        for server, core in enumerate(self.site.cores):
            self.go_on()
            self.take_back(server)
            self.do(server, core.attendance.let_in(worker, max(expected), 0.0))
        self.clocks[worker] = max(expected)

    def go_on(self) -> None:
        for _ in range(self.chance.randrange(4)):
            if self.clocks:
                self.step(self.chance.choice(list(self.clocks)))

    def settle(self) -> None:
        """All that has been pushed counts."""
        for server in range(len(self.site.cores)):
            self.take_back(server)
        for worker in list(self.waiting):
            self._look(worker)
        while self.asking:
            self.step(self.chance.choice([rank for rank in self.clocks if rank not in self.asking]))


def replayed(rule: Rule, size: int, servers: int, server: int, applied: list[Applied]) -> list[torch.Tensor]:
    """A server's parameters after the same updates, which nobody but its optimizers makes."""
    core = Site(rule, size, SGD, servers=servers).cores[server]
    for _, each in itertools.groupby(applied, key=lambda one: one.iteration):
        workers = [one.worker for one in each]
        for index, part in enumerate(core.parts):
            gradients = zip(*(core._clients[worker].gradients[index] for worker in workers), strict=True)
            for parameter, of_all in zip(part.shard.parameters, gradients, strict=True):
                parameter.grad = torch.stack(of_all).mean(0)
            part.shard.optimizer.step()
    return [parameter for part in core.parts for parameter in part.shard.parameters]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("rule", [bsp, asp])
def test_each_push_counts_on_all_servers_or_on_none(rule: Rule, servers: int, seed: int, deaths: Deaths) -> None:
    chance = Random(seed)
    size, num_first = 5, 3
    site = Site(rule, num_first, SGD, servers=servers, joiners=size - num_first)
    net = Net(site, chance, dict.fromkeys(range(num_first), 0))
    dead = set()
    for event in range(4):
        for _ in range(40):
            net.step(chance.choice(list(net.clocks)))
        if event in (1, 3) and len(net.clocks) > 1:
            deaths.left = chance.randrange(8 * servers)
            for _ in range(200):
                victim = chance.choice(list(net.clocks))
                try:
                    net.step(victim)
                except Died:
                    break
            deaths.left = None
            dead.add(victim)
            net.die(victim)
        elif event in (0, 2):
            net.come(num_first + event // 2)
    for _ in range(40):
        net.step(chance.choice(list(net.clocks)))
        assert not any(site.workers[worker].push(Done()) for worker in dead), "the dead are lent nothing"
    net.settle()

    first, *others = [Counter((one.worker, one.clock) for one in applied) for applied in net.applied]
    assert all(other == first for other in others)
    assert set(first.values()) == {1}, "each gradient counts once"
    assert sum(lending._num_loans for lending in site.lendings) >= servers
    for worker, done in net.done.items():
        counted = [clock for rank, clock in first if rank == worker]
        assert done.steps == max(counted, default=-1) + 1
    for worker, clock in net.clocks.items():
        assert max(own for rank, own in first if rank == worker) == clock - 1
    for server, core in enumerate(site.cores):
        own = [parameter for part in core.parts for parameter in part.shard.parameters]
        torch.testing.assert_close(own, replayed(rule, size, servers, server, net.applied[server]))


def test_what_a_worker_has_done_is_of_its_last_push_wherever_that_went() -> None:
    site = Site(asp, 2, SGD, joiners=0)
    (core,), (lending,) = site.cores, site.lendings

    def push_by_message(clock: int) -> None:
        for rank in range(2):
            body = {"done": list(Done(steps=clock + 1))}
            site.ask(Message(Kind.EXCHANGE, 1, sender=rank, clock=clock, pause_at=FOREVER, body=body))

    def take_back() -> None:
        core.intake.served_themselves(lending.take_back(core.parts).counted)

    push_by_message(0)
    site.lend()
    assert all(worker.push(Done(steps=2)) for worker in site.workers)
    take_back()
    push_by_message(2)
    site.lend()
    assert site.workers[0].push(Done(steps=4))
    take_back()
    said = [core.attendance.part_with(worker).counted for worker in range(2)]
    assert [(push.clock, Done(*push.body["done"]).steps) for push in said if push is not None] == [(3, 4), (2, 3)]


def test_a_push_that_a_dead_worker_left_half_counted_is_answered_once() -> None:
    """The last one to push makes the first server's update alone, and pushes again by message."""
    site = Site(bsp, 3, SGD, servers=2, joiners=0)

    def push_by_message(rank: int, clock: int) -> list[Message]:
        body = {"done": list(Done(steps=clock + 1))}
        return site.ask(Message(Kind.EXCHANGE, 1, sender=rank, clock=clock, pause_at=FOREVER, body=body))

    def take_back() -> None:
        for core, lending in zip(site.cores, site.lendings, strict=True):
            core.intake.served_themselves(lending.take_back(core.parts).counted)

    for rank in range(3):
        push_by_message(rank, 0)
    site.lend()
    last, _, first = site.workers
    assert first.push(Done(steps=2))
    for each in site.each[1]:
        assert each.may_push()
    site.each[1][0].push(Done(steps=2))
    assert last.push(Done(steps=2))
    take_back()
    counts = what_counts([core.attendance.part_with(1) for core in site.cores])
    for core in site.cores:
        list(core.attendance.let_go(1, counts, 0.0))
    assert [worker.take() for worker in (last, first)] == [None, None]
    answers = [answer for rank in (0, 2) for answer in push_by_message(rank, 1)]
    assert {answer.clock for answer in answers} == {2}
    site.lend()
    assert last.push(Done(steps=3))
    assert not last.is_over
    assert first.push(Done(steps=3))
    for worker in (last, first):
        served = worker.take()
        assert served is not None
        assert {(each.iteration, each.clock) for each in served} == {(3, 3)}
    assert torch.equal(site.parameters[0], site.parameters[2])
