"""Any order of messages among workers and several servers: everybody reaches every pause, and servers agree."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.closing import Answer
from paceline.server.shard import Shard


@dataclass
class Worker:
    """A worker as `ServerGroup` and `Session` have it behave: one request to every server, then all their answers."""

    clocks: list[int]
    answers: dict[int, Answer] = field(default_factory=dict)
    iteration: int = 0
    admitted: bool = True
    is_waiting: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Request:
    """A message from a worker to a server; `decided` is what the first server answered to the push before it."""

    worker: int
    server: int
    is_push: bool = False
    is_void: bool = False
    decided: Answer | None = None


class Fleet:
    """Workers and servers with messages between them that arrive in any order, except those of one pair."""

    def __init__(self, rules: Sequence[AdmissionRule], num_workers: int, randomness: random.Random) -> None:
        self.shards = []
        for rule in rules:
            parameter = torch.zeros(1)
            self.shards.append(Shard(parameters=[parameter], optimizer=torch.optim.SGD([parameter], lr=1.0), rule=rule))
        self.rules = rules
        self.workers = [Worker([0] * len(rules)) for _ in range(num_workers)]
        self.speeds = [randomness.choice([1, 1, 3, 20]) for _ in range(num_workers)]
        self.gradients = [[torch.ones(1)] for _ in range(num_workers)]
        self.since_pull = [[0] * num_workers for _ in rules]
        """Per server and worker: updates since the worker was last given the parameters, counted one by one."""
        self.messages: list[Request] = []
        self.num_pushes = 0
        self.pause_at = 0
        self._random = randomness

    def run_to_pause(self, pause_at: int, *, void_rate: float = 0.0) -> None:
        """Every worker goes on until it was told an iteration of at least `pause_at`; all must get there."""
        self.pause_at = pause_at
        for worker in self.workers:
            worker.stopped = False
        while True:
            idle = [i for i, worker in enumerate(self.workers) if not (worker.is_waiting or worker.stopped)]
            choices: list[Callable[[], None]] = [
                partial(self._act, i, self._random.random() < void_rate) for i in idle for _ in range(self.speeds[i])
            ]
            # A message of a slow link is chosen rarely: links differ, so that servers see different orders.
            first_of_pair = {(one.worker, one.server): one for one in reversed(self.messages)}
            choices += [
                partial(self._deliver, message)
                for message in first_of_pair.values()
                for _ in range(1 + (message.worker * 7 + message.server * 5) % 4)
            ]
            if not choices:
                break
            self._random.choice(choices)()
        blocked = [i for i, worker in enumerate(self.workers) if worker.is_waiting]
        assert not blocked, f"workers {blocked} are never answered: {self.workers}"
        assert all(worker.iteration >= pause_at for worker in self.workers)

    def _act(self, i: int, is_void: bool) -> None:
        """What a worker does next: stop, ask again, or push."""
        worker = self.workers[i]
        if worker.iteration >= self.pause_at:
            worker.stopped = True
            return
        if worker.admitted:
            self.check_bound(i)
            self.num_pushes += not is_void
        worker.is_waiting = True
        for server in range(len(self.shards)):
            self.messages.append(Request(i, server, worker.admitted, is_void))

    def check_bound(self, i: int) -> None:
        """The worker has computed a gradient: it may have."""
        for rule, clock in zip(self.rules, self.workers[i].clocks, strict=True):
            assert rule.clock_of(i) >= clock
            if isinstance(rule, StaleSynchronous):
                slowest = min(rule.clock_of(other) for other in rule.active)
                assert clock - slowest <= rule._staleness

    def _deliver(self, message: Request) -> None:
        self.messages.remove(message)
        i, server = message.worker, message.server
        shard, since_pull = self.shards[server], self.since_pull[server]
        if message.decided is not None:
            answers = shard.follow(i, message.decided.clock, message.decided.contributors or ())
        elif message.is_push:
            gradients = None if message.is_void else self.gradients[i]
            answers = shard.push(i, self.workers[i].clocks[server], gradients, pause_at=self.pause_at)
        else:
            answers = shard.wait(i, pause_at=self.pause_at)
        for iteration, group in itertools.groupby(shard.drain_applied(), key=lambda applied: applied.iteration):
            for applied in group:
                assert applied.staleness == since_pull[applied.worker]
                assert applied.staleness == 0 or isinstance(self.rules[server], StaleSynchronous)
            assert iteration == shard.iteration
            since_pull[:] = [count + 1 for count in since_pull]
        for answer in answers:
            shard.pulled(answer.worker)
            since_pull[answer.worker] = 0
            self._receive(server, answer)

    def _receive(self, server: int, answer: Answer) -> None:
        worker = self.workers[answer.worker]
        assert server not in worker.answers, "answered twice"
        worker.answers[server] = answer
        if answer.contributors is not None:
            others = [other for other, shard in enumerate(self.shards) if shard.follows]
            self.messages += [Request(answer.worker, other, decided=answer) for other in others]
        if len(worker.answers) == len(self.shards):
            worker.clocks = [worker.answers[0].clock] * len(self.shards)
            worker.iteration = worker.answers[0].iteration
            worker.admitted = all(a.admitted for a in worker.answers.values())
            worker.answers, worker.is_waiting = {}, False


def run_fleet(
    make_rule: Callable[[int], AdmissionRule], n: int, num_servers: int, randomness: random.Random, void_rate: float
) -> Fleet:
    first = make_rule(n)
    fleet = Fleet([first, *(first.for_another_shard() for _ in range(num_servers - 1))], n, randomness)
    if isinstance(first, BulkSynchronous):  # so that parameters tell whose gradients they are made of
        fleet.gradients = [[torch.full((1,), 2.0**worker)] for worker in range(n)]
    pause_at = 0
    for _ in range(4):
        pause_at += randomness.choice([1, 2, 3, 7, 20])
        fleet.run_to_pause(pause_at, void_rate=void_rate)
    return fleet


VOID_RATES = st.sampled_from([0.0, 0.2])
RANDOMS = st.integers(0, 2**32).map(random.Random)


@given(n=st.integers(1, 5), num_servers=st.integers(1, 3), randomness=RANDOMS, void_rate=VOID_RATES)
def test_bsp_everyone_reaches_every_pause(
    n: int, num_servers: int, randomness: random.Random, void_rate: float
) -> None:
    fleet = run_fleet(lambda n: BulkSynchronous(Membership.first(n)), n, num_servers, randomness, void_rate)
    # All servers have made the same updates of the same clocks, and stopped exactly at the pause.
    assert {shard.iteration for shard in fleet.shards} == {fleet.pause_at}
    assert len({tuple(worker.clocks) for worker in fleet.workers}) == 1


@given(n=st.integers(1, 5), num_servers=st.integers(1, 4), data=st.data(), randomness=RANDOMS, void_rate=VOID_RATES)
def test_backup_workers_everyone_reaches_every_pause_and_shards_agree(
    n: int, num_servers: int, data: st.DataObject, randomness: random.Random, void_rate: float
) -> None:
    b = data.draw(st.integers(0, n - 1))
    rule = partial(BulkSynchronous, backup_workers=b)
    fleet = run_fleet(lambda n: rule(Membership.first(n)), n, num_servers, randomness, void_rate)
    assert {shard.iteration for shard in fleet.shards} == {fleet.pause_at}
    assert len({shard.parameters[0].item() for shard in fleet.shards}) == 1, "the same gradients counted everywhere"


@given(
    n=st.integers(1, 5),
    staleness=st.sampled_from([0, 1, 3, math.inf]),
    num_servers=st.integers(1, 3),
    randomness=RANDOMS,
    void_rate=VOID_RATES,
)
def test_ssp_everyone_reaches_every_pause(
    n: int, staleness: float, num_servers: int, randomness: random.Random, void_rate: float
) -> None:
    def make_rule(n: int) -> AdmissionRule:
        return StaleSynchronous(Membership.first(n), staleness=staleness)

    fleet = run_fleet(make_rule, n, num_servers, randomness, void_rate)
    for shard in fleet.shards:
        assert shard.iteration == fleet.num_pushes
        assert shard.parameters[0].item() == -fleet.num_pushes
    for rule in fleet.rules:
        clocks = [rule.clock_of(worker) for worker in range(n)]
        assert max(clocks) - min(clocks) <= staleness + 1
