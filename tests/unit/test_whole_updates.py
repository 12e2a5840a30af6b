"""Rounds in which all workers that are there have a part, under servers: whoever dies, is taken for dead, or joins
between any two messages, each sample counts in one, and every server has made the same updates in the end. Where global
batches are kept, these are of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.aggregate import MEAN, Aggregator, Contribution, Krum, Median, TrimmedMean, join
from paceline.elastic import Cursor, Deal, Done, GlobalBatch, resized
from paceline.errors import RunFailed
from paceline.membership import Membership
from paceline.messages import Message
from paceline.server.admission import ProtocolError
from paceline.server.whole_updates import Round, Share, Took, WholeUpdate
from tests.unit.protocol_net import EPOCH, LR, RULES, Net
from tests.unit.test_outlived_by_servers import act, letting_go, lose_some
from tests.unit.test_shard import SHAPES, make_shard

VALUES = [float((7 * sample + 3) % 11) for sample in range(29)]
"""Of each sample: its gradient, the same for all elements."""


def batches(num_workers: int) -> list[list[list[int]]]:
    """Global batches of two samples for each worker; the last one has fewer."""
    samples, size = range(len(VALUES)), 2 * num_workers
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [[[*group[2 * part : 2 * part + 2]] for part in range(num_workers)] for group in groups]


class Worker:
    """Deals itself its data as all do, from what servers say.

    Args:
        stands_in: pushes something also where it has no samples.
    """

    def __init__(
        self,
        rank: int,
        groups: list[list[list[int]]],
        *,
        global_batch: GlobalBatch = "keep",
        stands_in: bool = False,
    ) -> None:
        self.rank, self.groups, self.global_batch, self.stands_in = rank, groups, global_batch, stands_in
        self.ranks, self.cursor, self.clock = tuple(range(len(groups[0]))), Cursor(), 0
        self.deal: Deal | None = None

    def begins(self) -> bool:
        size = len(self.ranks)
        self.deal = self.deal or self.cursor.deal(self.groups, size=size, global_batch=self.global_batch)
        return self.deal is not None

    @property
    def own(self) -> tuple[int, ...]:
        """Its samples of the round."""
        assert self.deal is not None
        return self.deal.parts[self.ranks.index(self.rank)]

    @property
    def value(self) -> float:
        """Of its gradient, without samples of that of another's."""
        assert self.deal is not None
        return mean_of(self.own or self.deal.stand_in)

    def push(self, net: Net) -> None:
        assert self.deal is not None
        own, of = self.own, self.deal.num_samples if self.global_batch == "keep" else 0
        share = Share(len(own), of, 0, self.deal.after.num_groups)
        weight = self.deal.weight(self.ranks.index(self.rank)) or 1.0
        is_void = not own and not self.stands_in
        net.push(self.rank, self.value, share=share, weight=weight, void=is_void, done=Done(0, self.clock + 1))

    def ended(self, workers: Sequence[int]) -> None:
        assert self.deal is not None
        lost = [place for place, rank in enumerate(self.ranks) if rank not in workers]
        joiners = [rank for rank in workers if rank not in self.ranks]
        (deal,) = resized([self.deal], lost=lost, num_joiners=len(joiners), global_batch=self.global_batch)
        self.ranks, self.cursor, self.deal, self.clock = tuple(workers), deal.after, None, self.clock + 1

    def enter(self, giver: Worker, *, clock: int, took: Sequence[Took]) -> None:
        """From what another one had when it gave that."""
        self.ranks, self.cursor, self.deal, self.clock = giver.ranks, giver.cursor, giver.deal, giver.clock
        while self.begins() and self.clock < clock:
            self.ended(next(each.workers for each in reversed(took) if each.clock <= self.clock))
        assert self.clock == clock
        if self.deal is not None:
            (self.deal,) = resized([self.deal], lost=(), num_joiners=1, global_batch=self.global_batch)
        self.ranks = (*self.ranks, self.rank)

    def as_it_is(self) -> Worker:
        copied = Worker(self.rank, self.groups, global_batch=self.global_batch, stands_in=self.stands_in)
        copied.ranks, copied.cursor, copied.deal, copied.clock = self.ranks, self.cursor, self.deal, self.clock
        return copied


def mean_of(samples: Sequence[int]) -> float:
    return sum(VALUES[sample] for sample in samples) / len(samples)


class Training:
    """Of workers on servers, of whom some die after so many messages, and one joins with the state of another, some
    messages after that gave it.

    Args:
        least: workers that live to the end.
    """

    def __init__(
        self,
        randomness: random.Random,
        *,
        num_workers: int,
        num_servers: int,
        near: float,
        die_after: list[int],
        gives_after: int,
        joins_later: int,
        lives_on: bool,
        least: int = 1,
        aggregator: Aggregator = MEAN,
        global_batch: GlobalBatch = "keep",
    ) -> None:
        self.groups = batches(num_workers)
        beside = [[randomness.random() < near for _ in range(num_servers)] for _ in range(num_workers + 1)]
        self.net = Net(
            (RULES["bsp"](Membership.first(num_workers)) for _ in range(num_servers)),
            beside,
            randomness=randomness,
            piece_bytes=64,
            outlives_workers=True,
            aggregator=aggregator,
        )
        self.aggregator, self.global_batch = aggregator, global_batch
        self.workers = {rank: self._made(rank) for rank in range(num_workers)}
        self.pushed: dict[tuple[int, int], tuple[tuple[int, ...], float]] = {}
        """By worker and clock: the samples of what it pushed, and the value."""
        self.took: dict[int, tuple[int, ...]] = {}
        """By clock, whose pushes the round was made of."""
        self._given: Worker | None = None
        self._asked: dict[int, str] = {}
        self._acting = set(self.workers)
        self._run(randomness, num_workers, sorted(die_after)[: num_workers - least], gives_after, joins_later, lives_on)

    def _made(self, rank: int) -> Worker:
        stands_in = not self.aggregator.streams
        return Worker(rank, self.groups, global_batch=self.global_batch, stands_in=stands_in)

    def _go_on(self) -> None:
        net, asked = self.net, self._asked
        for rank in sorted(self._acting):
            client = net.clients[rank]
            if asked.get(rank) == "leave" or (rank in asked and not net.is_idle(rank)):
                continue
            worker = self.workers[rank]
            if rank in asked:
                client.require_done()
                reply = client.reply()
                assert reply.admitted
                if asked[rank] == "push":
                    took = reply.took[-1].workers
                    assert self.took.setdefault(worker.clock, took) == took
                    worker.ended(took)
                else:
                    assert self._given is not None
                    worker.enter(self._given, clock=reply.clock, took=reply.took)
            if worker.begins():
                self.pushed[rank, worker.clock] = worker.own, worker.value
                worker.push(net)
                asked[rank] = "push"
            else:
                net.ask(rank, client.leave())
                asked[rank] = "leave"

    def _run(
        self,
        randomness: random.Random,
        joiner: int,
        deaths: list[int],
        gives_after: int,
        joins_later: int,
        lives_on: bool,
    ) -> None:
        net, living, num_servers = self.net, set(self.workers), len(self.net.servers)
        launcher: Generator[None, None, Done] | None = None
        gone, clocks, told, num_delivered = -1, list[int](), 0, 0
        self._go_on()
        while True:
            is_over = any(self._asked.get(rank) == "leave" for rank in living)
            if launcher is None and deaths and num_delivered >= deaths[0] and not is_over and not clocks:
                deaths.pop(0)
                gone = randomness.choice(sorted(living - {0}))
                living.discard(gone)
                launcher = letting_go(net, gone)
                if not lives_on:
                    self._acting.discard(gone)
                    lose_some(net, gone, randomness)
            if self._given is None and num_delivered >= gives_after:
                self._given = self.workers[0].as_it_is()
            elif (
                launcher is None
                and self._given is not None
                and num_delivered >= gives_after + joins_later
                and told < num_servers
            ):
                if is_over and not clocks:
                    told = num_servers  # it comes too late
                elif len(clocks) < num_servers:
                    clocks.append(net.servers[len(clocks)].attendance.expect(joiner))
                else:
                    act(net, told, net.servers[told].attendance.let_in(joiner, max(clocks), 0.0))
                    told += 1
                    if told == num_servers:
                        net.ask(joiner, net.clients[joiner].wait(pause_at=2**60))
                        self.workers[joiner], self._asked[joiner] = self._made(joiner), "wait"
                        self._acting.add(joiner)
                        living.add(joiner)
                        clocks.clear()
            self._go_on()
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
                    self._acting.discard(gone)
        assert not net.errors
        assert all(self._asked[rank] == "leave" for rank in living)

    def require_on_all(self, wanted: float, *, updates: int) -> None:
        """Every server has made so many updates, of the same gradients, and its parameters are this."""
        net = self.net
        for server in net.servers:
            assert server.iteration == updates
            for part in server.parts:
                values = {float(element) for tensor in part.shard.parameters for element in tensor} - {0.0}
                assert all(value == pytest.approx(wanted, rel=1e-4, abs=1e-4) for value in values)
        counted = [
            {(each.worker, each.clock) for each in net.records if each.server == server}
            for server in range(len(net.servers))
        ]
        assert all(each == counted[0] for each in counted)


SCHEDULES = {
    "randomness": st.integers(0, 2**32).map(random.Random),
    "num_servers": st.integers(1, 3),
    "near": st.sampled_from([0.0, 0.5, 1.0]),
    "die_after": st.lists(st.integers(0, 150), max_size=3, unique=True),
    "gives_after": st.integers(0, 60),
    "joins_later": st.integers(0, 40),
    "lives_on": st.booleans(),
}


@given(num_workers=st.integers(2, 4), **SCHEDULES)
def test_whoever_dies_and_joins_updates_are_of_whole_batches(
    randomness: random.Random, num_workers: int, **schedule: Any
) -> None:
    training = Training(randomness, num_workers=num_workers, **schedule)
    groups = training.groups
    wanted = -LR * sum(sum(VALUES[s] for part in group for s in part) / sum(map(len, group)) for group in groups)
    training.require_on_all(wanted, updates=len(groups))


@given(
    num_workers=st.integers(3, 5),
    aggregator=st.sampled_from([TrimmedMean(byzantine=1), Median()]),
    global_batch=st.sampled_from(["keep", "grow"]),
    **SCHEDULES,
)
def test_whoever_dies_and_joins_an_aggregator_has_a_gradient_of_each_who_is_there(
    randomness: random.Random, aggregator: Aggregator, global_batch: GlobalBatch, **schedule: Any
) -> None:
    """Where those with samples are fewer than it takes, others' stand in. Each sample counts in one round."""
    training = Training(randomness, least=3, aggregator=aggregator, global_batch=global_batch, **schedule)
    counted, wanted, num_whole = Counter[int](), 0.0, 0
    for clock, workers in sorted(training.took.items()):
        given_ = []
        for rank in workers:
            own, value = training.pushed[rank, clock]
            given_.append(Contribution(rank, len(own), "gradient", [torch.tensor([value])]))
            counted.update(own)
        num_samples = sum(int(each.weight) for each in given_)
        if num_samples:
            (joint,) = join(aggregator, given_, [torch.zeros(1)])
            of = num_samples if global_batch == "grow" else group_size(training.groups, counted)
            wanted -= LR * float(joint) * num_samples / of
            num_whole += 1
    assert counted == Counter(range(len(VALUES)))
    training.require_on_all(wanted, updates=num_whole if global_batch == "grow" else len(training.groups))


def group_size(groups: list[list[list[int]]], counted: Counter[int]) -> int:
    """Of the global batch that was the last to come to count."""
    sizes, num_counted = [sum(map(len, group)) for group in groups], counted.total()
    return next(size for number, size in enumerate(sizes, start=1) if num_counted <= sum(sizes[:number]))


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


def parameters_of(shard) -> set[float]:
    return {float(element) for parameter in shard.parameters for element in parameter.reshape(-1)}


@pytest.mark.parametrize("keeps", [True, False], ids=["keep", "grow"])
def test_what_stands_in_is_given_where_the_aggregator_needs_it(keeps: bool) -> None:
    """Of four workers three have samples, and then one."""
    of = [10, 2] if keeps else [0, 0]
    shard = make_shard(RULES["bsp"](Membership.first(4)), aggregator=TrimmedMean(byzantine=1))
    for worker, (value, num_samples) in enumerate([(1.0, 4), (2.0, 4), (9.0, 2), (100.0, 0)]):
        answers = pushed(shard, worker, 0, value, Share(num_samples, of[0], 0, 1), weight=2.0)
    assert parameters_of(shard) == {-2.0}
    assert [answer.staleness for answer in answers] == [0, 0, 0, -1]
    assert {each.worker for each in shard.drain_applied()} == {0, 1, 2}
    for worker, (value, num_samples) in enumerate([(3.0, 0), (5.0, 2), (8.0, 0), (0.0, 0)]):
        pushed(shard, worker, 1, value, Share(num_samples, of[1], 0, 2))
    assert parameters_of(shard) == {-2.0 - 4.0}
    assert [each.worker for each in shard.drain_applied()] == [1]


def test_a_round_is_void_whose_stand_in_is_needed_and_none() -> None:
    shard = make_shard(RULES["bsp"](Membership.first(3)), aggregator=TrimmedMean(byzantine=1))
    for clock, stands_in in enumerate([None, 5.0]):
        pushed(shard, 0, clock, 1.0, Share(1, 0, 0, clock))
        pushed(shard, 1, clock, 1.0, Share(1, 0, 0, clock))
        pushed(shard, 2, clock, stands_in, Share(0, 0, 0, clock))
        assert shard.iteration == clock
    shard = make_shard(RULES["bsp"](Membership.first(3)), aggregator=Median())
    pushed(shard, 0, 0, 1.0, Share(1, 0, 0, 1))
    pushed(shard, 1, 0, 1.0, Share(1, 0, 0, 1))
    pushed(shard, 2, 0, None, Share(0, 0, 0, 1))
    assert shard.iteration == 1


def test_what_stands_in_is_not_needed_where_nobody_is_left_who_has_samples() -> None:
    """The update that is open takes its samples from a later round."""
    shard = make_shard(RULES["bsp"](Membership.first(4)), aggregator=TrimmedMean(byzantine=1))
    for worker, stands_in in enumerate([1.0, 1.0, None]):
        pushed(shard, worker, 0, stands_in, Share(0, 2, 0, 1))
    shard.leave(3)
    for worker, num_samples in enumerate([1, 1, 0]):
        pushed(shard, worker, 1, 3.0, Share(num_samples, 2, 0, 1))
    assert (shard.iteration, parameters_of(shard)) == (1, {-3.0})


def test_where_nobody_is_left_who_has_samples_nothing_is_updated() -> None:
    shard = make_shard(RULES["bsp"](Membership.first(3)), aggregator=Median())
    pushed(shard, 0, 0, 1.0, Share(0, 0, 0, 1))
    pushed(shard, 1, 0, 1.0, Share(0, 0, 0, 1))
    (answer, _) = shard.leave(2)
    assert answer.took == (Took(0, (0, 1)),)
    assert (shard.iteration, parameters_of(shard)) == (0, {0.0})


def test_too_few_for_the_aggregator_end_the_run_in_words() -> None:
    shard = make_shard(RULES["bsp"](Membership.first(4)), aggregator=Krum(byzantine=1))
    for worker in range(3):
        pushed(shard, worker, 0, 1.0, Share(1, 0, 0, 1))
    with pytest.raises(RunFailed, match=r"krum:byzantine=1: .*needs 4 .* workers 0, 1, 2 have contributed .* --resume"):
        shard.leave(3)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (Share(2, 4, 0, 2), "a worker pushed for global batch 2 of epoch 0"),
        (Share(2, 6, 0, 1), "of 6 samples, and others for global batch 1 of epoch 0, of 4"),
        (Share(2, 4, 1, 1), "global batch 1 of epoch 1"),
        (Share(3, 4, 0, 1), "of which 2 samples are there"),
        (Share(5, 4, 0, 1), "pushed 5 samples of an update of 4"),
        (Share(-1, 0, 0, 1), "pushed -1 samples of an update of 0"),
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
