"""Updates of whole global batches under servers: whoever dies, is taken for dead, or joins between any two messages,
others give them in other rounds, and every server has made the same updates in the end."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic import Cursor, Deal, Done, resized
from paceline.membership import Membership
from paceline.messages import Message
from paceline.server.admission import ProtocolError
from paceline.server.whole_updates import Round, Share, Took, WholeUpdate
from tests.unit.test_outlived_by_servers import act, letting_go, lose_some
from tests.unit.test_server_protocol import EPOCH, LR, RULES, Net
from tests.unit.test_shard import SHAPES, make_shard

VALUES = [float((7 * sample + 3) % 11) for sample in range(29)]
"""Of each sample: its gradient, the same for all elements."""


def batches(num_workers: int) -> list[list[list[int]]]:
    """Global batches of two samples for each worker; the last one has fewer."""
    samples, size = range(len(VALUES)), 2 * num_workers
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [[[*group[2 * part : 2 * part + 2]] for part in range(num_workers)] for group in groups]


class Worker:
    """Deals itself its data as all do, from what servers say."""

    def __init__(self, rank: int, groups: list[list[list[int]]]) -> None:
        self.rank, self.groups = rank, groups
        self.ranks, self.cursor, self.clock = tuple(range(len(groups[0]))), Cursor(), 0
        self.deal: Deal | None = None

    def begins(self) -> bool:
        self.deal = self.deal or self.cursor.deal(self.groups, size=len(self.ranks), global_batch="keep")
        return self.deal is not None

    def push(self, net: Net) -> None:
        assert self.deal is not None
        place = self.ranks.index(self.rank)
        own = self.deal.parts[place]
        share = Share(len(own), self.deal.num_samples, 0, self.deal.after.num_groups)
        value = sum(VALUES[sample] for sample in own) / max(1, len(own))
        weight = self.deal.weight(place) or 1.0
        net.push(self.rank, value, share=share, weight=weight, void=not own, done=Done(0, self.clock + 1))

    def ended(self, workers: Sequence[int]) -> None:
        assert self.deal is not None
        lost = [place for place, rank in enumerate(self.ranks) if rank not in workers]
        joiners = [rank for rank in workers if rank not in self.ranks]
        (deal,) = resized([self.deal], lost=lost, num_joiners=len(joiners), global_batch="keep")
        self.ranks, self.cursor, self.deal, self.clock = tuple(workers), deal.after, None, self.clock + 1

    def enter(self, giver: Worker, *, clock: int, took: Sequence[Took]) -> None:
        """From what another one had when it gave that."""
        self.ranks, self.cursor, self.deal, self.clock = giver.ranks, giver.cursor, giver.deal, giver.clock
        while self.begins() and self.clock < clock:
            self.ended(next(each.workers for each in reversed(took) if each.clock <= self.clock))
        assert self.clock == clock
        if self.deal is not None:
            (self.deal,) = resized([self.deal], lost=(), num_joiners=1, global_batch="keep")
        self.ranks = (*self.ranks, self.rank)

    def as_it_is(self) -> Worker:
        copied = Worker(self.rank, self.groups)
        copied.ranks, copied.cursor, copied.deal, copied.clock = self.ranks, self.cursor, self.deal, self.clock
        return copied


@given(
    randomness=st.integers(0, 2**32).map(random.Random),
    num_workers=st.integers(2, 4),
    num_servers=st.integers(1, 3),
    near=st.sampled_from([0.0, 0.5, 1.0]),
    die_after=st.lists(st.integers(0, 150), max_size=3, unique=True),
    gives_after=st.integers(0, 60),
    joins_later=st.integers(0, 40),
    lives_on=st.booleans(),
)
def test_whoever_dies_and_joins_updates_are_of_whole_batches(
    randomness: random.Random,
    num_workers: int,
    num_servers: int,
    near: float,
    die_after: list[int],
    gives_after: int,
    joins_later: int,
    lives_on: bool,
) -> None:
    """One that dies after so many messages, as many as may; one joins with the state of another, some messages after
    that gave it."""
    groups, joiner = batches(num_workers), num_workers
    beside = [[randomness.random() < near for _ in range(num_servers)] for _ in range(num_workers + 1)]
    rules = (RULES["bsp"](Membership.first(num_workers)) for _ in range(num_servers))
    net = Net(rules, beside, randomness=randomness, piece_bytes=64, outlives_workers=True)
    workers = {rank: Worker(rank, groups) for rank in range(num_workers)}
    given_: Worker | None = None
    asked: dict[int, str] = {}
    acting, living, deaths = set(workers), set(workers), sorted(die_after)[: num_workers - 1]
    launcher: Generator[None, None, Done] | None = None
    gone, clocks, told, num_delivered = -1, list[int](), 0, 0

    def go_on() -> None:
        for rank in sorted(acting):
            client = net.clients[rank]
            if asked.get(rank) == "leave" or (rank in asked and not net.is_idle(rank)):
                continue
            if rank in asked:
                client.require_done()
                reply = client.reply()
                assert reply.admitted
                if asked[rank] == "push":
                    workers[rank].ended(reply.took[-1].workers)
                else:
                    assert given_ is not None
                    workers[rank].enter(given_, clock=reply.clock, took=reply.took)
            if workers[rank].begins():
                workers[rank].push(net)
                asked[rank] = "push"
            else:
                net.ask(rank, client.leave())
                asked[rank] = "leave"

    go_on()
    while True:
        is_over = any(asked.get(rank) == "leave" for rank in living)
        if launcher is None and deaths and num_delivered >= deaths[0] and not is_over and not clocks:
            deaths.pop(0)
            gone = randomness.choice(sorted(living - {0}))
            living.discard(gone)
            launcher = letting_go(net, gone)
            if not lives_on:
                acting.discard(gone)
                lose_some(net, gone, randomness)
        if given_ is None and num_delivered >= gives_after:
            given_ = workers[0].as_it_is()
        elif (
            launcher is None
            and given_ is not None
            and num_delivered >= gives_after + joins_later
            and told < num_servers
        ):
            if is_over and not clocks:
                told = num_servers  # it comes too late
            elif len(clocks) < num_servers:
                clocks.append(net.servers[len(clocks)].expect(joiner))
            else:
                act(net, told, net.servers[told].let_in(joiner, max(clocks), 0.0))
                told += 1
                if told == num_servers:
                    net.ask(joiner, net.clients[joiner].wait(pause_at=2**60))
                    workers[joiner], asked[joiner] = Worker(joiner, groups), "wait"
                    acting.add(joiner)
                    living.add(joiner)
                    clocks.clear()
        go_on()
        ways: list[tuple[bool, int, int] | None] = [way for way, queue in net.under_way.items() if queue]
        ways += [None] if launcher is not None else []
        if not ways and (told == num_servers or num_delivered > 10**4):
            break
        way = randomness.choice(ways) if ways else None
        num_delivered += 1
        if way is not None:
            net.deliver(way, Message.decode(net.under_way[way].popleft(), epoch=EPOCH))
        elif launcher is not None:
            try:
                next(launcher)
            except StopIteration:
                launcher = None
                acting.discard(gone)
    assert not net.errors
    assert all(asked[rank] == "leave" for rank in living)
    wanted = -LR * sum(sum(VALUES[s] for part in group for s in part) / sum(map(len, group)) for group in groups)
    for server in net.servers:
        assert server.iteration == len(groups)
        for part in server.parts:
            values = {float(element) for tensor in part.shard.parameters for element in tensor} - {0.0}
            assert all(value == pytest.approx(wanted, rel=1e-5) for value in values)
    counted = [{(each.worker, each.clock) for each in net.records if each.server == s} for s in range(num_servers)]
    assert all(each == counted[0] for each in counted)


def pushed(shard, worker: int, clock: int, value: float | None, share: Share | None, weight: float = 1.0):
    tensors = None if value is None else [torch.full(shape, value) for shape in SHAPES]
    plain = None if share is None else list(share)
    return shard.push(worker, clock, tensors, pause_at=10**9, share=plain, weight=weight)


def test_rounds_count_by_their_samples_and_change_nothing_before_all_are_there() -> None:
    shard = make_shard(RULES["bsp"](Membership.first(2)))
    pushed(shard, 0, 0, 4.0, Share(2, 8, 0, 1), weight=2.0)
    answers = pushed(shard, 1, 0, 1.0, Share(1, 8, 0, 1))
    assert shard.iteration == 0
    assert not any(parameter.any() for parameter in shard.parameters)
    assert {answer.staleness for answer in answers} == {0}
    assert all(answer.took == (Took(0, (0, 1)),) for answer in answers)
    assert shard.drain_applied() == []
    shard.leave(1)
    (answer,) = pushed(shard, 0, 1, 3.0, Share(5, 8, 0, 1))
    assert answer.took == (Took(1, (0,)),)
    assert shard.iteration == 1
    assert all((parameter == -(4.0 * 2 + 1.0 + 3.0 * 5) / 8).all() for parameter in shard.parameters)
    applied = shard.drain_applied()
    assert {(each.worker, each.clock) for each in applied} == {(0, 0), (1, 0), (0, 1)}
    assert {each.iteration for each in applied} == {1}


def test_a_void_round_voids_its_update_and_one_without_samples_does_not() -> None:
    shard = make_shard(RULES["bsp"](Membership.first(2)))
    pushed(shard, 0, 0, 4.0, Share(2, 4, 0, 1))
    pushed(shard, 1, 0, None, Share(1, 4, 0, 1))
    pushed(shard, 0, 1, 4.0, Share(1, 4, 0, 1))
    pushed(shard, 1, 1, None, Share(0, 4, 0, 1))
    assert shard.iteration == 0
    pushed(shard, 0, 2, 2.0, Share(4, 4, 0, 2))
    pushed(shard, 1, 2, None, Share(0, 4, 0, 2))
    assert shard.iteration == 1
    assert all((parameter == -2.0).all() for parameter in shard.parameters)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (Share(2, 4, 0, 2), "a worker pushed for global batch 2 of epoch 0"),
        (Share(2, 6, 0, 1), "of 6 samples, and others for global batch 1 of epoch 0, of 4"),
        (Share(2, 4, 1, 1), "global batch 1 of epoch 1"),
        (Share(3, 4, 0, 1), "of which 2 samples are there"),
        (Share(5, 4, 0, 1), "pushed 5 samples of an update of 4"),
    ],
)
def test_workers_that_are_elsewhere_in_the_data_are_refused(share: Share, words: str) -> None:
    shard = make_shard(RULES["bsp"](Membership.first(2)))
    pushed(shard, 0, 0, 1.0, Share(1, 4, 0, 1))
    pushed(shard, 1, 0, 1.0, Share(1, 4, 0, 1))
    with pytest.raises(ProtocolError, match=words):
        pushed(shard, 0, 1, 1.0, share)


@pytest.mark.parametrize("plain", [3, [1, 2], [1, 2, 3, "4"], [True, 4, 0, 1]])
def test_what_is_no_share_is_refused(plain: object) -> None:
    with pytest.raises(ProtocolError, match="as its share of an update"):
        Share.of_plain(plain)


def test_who_took_part_is_noted_when_that_changes() -> None:
    whole = WholeUpdate()
    for clock, workers in enumerate([(0, 1), (0, 1), (0,), (0, 2)]):
        whole.require(Share(1, 1, 0, clock))
        whole.end_round(Round(clock, Share(1, 1, 0, clock), is_void=False), workers, [torch.zeros(1)])
        whole.take()
    assert whole.took == [Took(0, (0, 1)), Took(2, (0,)), Took(3, (0, 2))]
