"""Each batch of an epoch counts once, whoever comes and goes when, as long as somebody is left to ask for it."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic import Done, Lane, LaneBatch, LaneBook, Lanes
from paceline.elastic.lane_book import in_words

EPOCHS, BATCHES = 2, 12


class Worker:
    """Trains as its script does: lane by lane, and then what is left to it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.epoch, self.own, self.left_over, self.steps = rank, 0, 0, 0, 0
        self.lane: Lane | None = None
        self.has_begun = False
        self.end = BATCHES
        """Of its lane, the first batch that it has given back."""
        self.doing: tuple[int, int] | None = None
        """A batch that is taken, and not done."""
        self.is_left_over = False

    @property
    def length(self) -> int:
        return 0 if self.lane is None else len(range(self.lane.lane, BATCHES, self.lane.size))

    def give_back(self, lanes: Lanes, *, ahead: int) -> Lanes:
        """All but what it has begun, or fetched ahead."""
        begun = self.own + (self.doing is not None and not self.is_left_over)
        if self.lane is None or not self.has_begun or self.end < BATCHES or begun == self.length:
            return lanes
        self.end = min(self.length, begun + ahead)
        return lanes.give_back(self.rank, LaneBatch(self.epoch, self.end, *self.lane))

    def take(self, lanes: Lanes) -> Lanes:
        """The next batch, if there is one."""
        if not self.has_begun:
            lanes, self.lane = lanes.begin(self.rank, epoch=self.epoch)
            self.has_begun, self.own, self.end = True, 0, BATCHES
        if self.own < min(self.end, self.length):
            assert self.lane is not None
            self.doing, self.is_left_over = (self.epoch, self.own * self.lane.size + self.lane.lane), False
            return lanes
        while True:
            lanes, batch = lanes.give(self.rank, epoch=self.epoch)
            if batch is None:
                self.epoch, self.own, self.has_begun = self.epoch + 1, 0, False
                return lanes
            index = batch.number * batch.size + batch.lane
            if index < BATCHES:
                self.doing, self.is_left_over = (batch.epoch, index), True
                return lanes
            lanes = lanes.is_none(self.rank, batch)

    def commit(self, counted: Counter[tuple[int, int]]) -> None:
        assert self.doing is not None
        counted[self.doing] += 1
        self.own, self.left_over = self.own + (not self.is_left_over), self.left_over + self.is_left_over
        self.steps, self.doing = self.steps + 1, None

    @property
    def done(self) -> Done:
        return Done(self.epoch, self.own, self.length if self.has_begun else -1, self.left_over, 0, self.steps)


@given(st.data(), st.integers(1, 4))
def test_each_batch_counts_once(data: st.DataObject, num_workers: int) -> None:
    lanes, counted = Lanes.first(num_workers), Counter[tuple[int, int]]()
    living = [Worker(rank) for rank in range(num_workers)]
    left = num_workers - 1 if num_workers > 1 else 0
    ranks, is_gone = iter(range(num_workers, num_workers + 2)), False
    while any(worker.epoch < EPOCHS for worker in living):
        training = [worker for worker in living if worker.epoch < EPOCHS]
        worker = data.draw(st.sampled_from(training))
        chance = data.draw(st.integers(0, 19))
        # Whoever goes when all others have come to their end has nobody to do the rest.
        if left and len(training) > 1 and chance < 2:
            lanes, left, is_gone = lanes.gone(worker.rank, worker.done), left - 1, True
            living.remove(worker)
        elif chance == 2 and (rank := next(ranks, None)) is not None:
            for each in living:
                lanes = each.give_back(lanes, ahead=data.draw(st.integers(0, 2)))
            lanes = lanes.come(rank)
            living.append(Worker(rank))
            living[-1].epoch = max(each.epoch for each in training)
        elif worker.doing is None:
            lanes = worker.take(lanes)
        else:
            worker.commit(counted)
        lanes = Lanes.of_plain(json.loads(json.dumps(lanes.plain)))
    undone = lanes.before(EPOCHS)
    assert is_gone or not undone
    assert set(counted.values()) <= {1}
    whole = {(epoch, index) for epoch in range(EPOCHS) for index in range(BATCHES)}
    for epoch, index in whole - set(counted):
        assert any(_has(each, epoch, index) for each in undone)
    for each in lanes.back:
        assert (each.epoch, each.number * each.size + each.lane) not in counted


def test_who_has_gone_goes_once() -> None:
    """Also where the launcher is interrupted in the midst of it, and does it again."""
    lanes, _ = Lanes.first(2).begin(0, epoch=0)
    done = Done(0, 1, 6, samples=4, steps=1)
    gone = lanes.gone(0, done)
    assert gone != lanes
    assert gone.gone(0, done) == gone


def test_what_comes_of_one_who_has_died_gives_nothing_back() -> None:
    lanes, _ = Lanes.first(2).begin(0, epoch=0)
    gone = lanes.gone(0, Done())
    assert gone.give_back(0, LaneBatch(0, 2, 0, 2)) == gone


def _has(rest: LaneBatch, epoch: int, index: int) -> bool:
    return rest.epoch == epoch and index % rest.size == rest.lane and index // rest.size >= rest.number


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_a_resumed_run_does_what_was_left(data: st.DataObject, before: int, after: int) -> None:
    lanes, counted = Lanes.first(before), Counter[tuple[int, int]]()
    workers = [Worker(rank) for rank in range(before)]
    for _ in range(data.draw(st.integers(0, 20))):
        worker = data.draw(st.sampled_from(workers))
        if worker.doing is not None:
            worker.commit(counted)
        elif worker.epoch < EPOCHS:
            lanes = worker.take(lanes)
    everyone = {worker.rank: worker.done for worker in workers}
    lanes = Lanes.resumed(lanes.plain, everyone, num_workers=after)
    workers = [Worker(rank) for rank in range(after)]
    for worker in workers:
        worker.epoch = max(lanes.dealt, default=0)
    while any(worker.epoch < EPOCHS for worker in workers):
        worker = data.draw(st.sampled_from([worker for worker in workers if worker.epoch < EPOCHS]))
        if worker.doing is None:
            lanes = worker.take(lanes)
        else:
            worker.commit(counted)
    assert counted == Counter({(epoch, index): 1 for epoch in range(EPOCHS) for index in range(BATCHES)})


def test_the_book_knows_who_has_a_lane_to_itself() -> None:
    """Until it has given back the rest, has come to the end or is gone. A run that goes on has what is left."""
    book = LaneBook(3)
    assert [book.begin(rank, epoch=1) for rank in range(3)] == [Lane(rank, 3) for rank in range(3)]
    assert not any(book.have_given_back([rank]) for rank in range(3))
    book.give_back(0, LaneBatch(1, 2, 0, 3))
    assert book.next_left_over(1, epoch=1, none=None) == LaneBatch(1, 2, 0, 3)
    assert book.next_left_over(1, epoch=1, none=LaneBatch(1, 2, 0, 3)) is None
    assert book.have_given_back([0, 1])
    assert not book.have_given_back([2])
    book.gone(2, Done(1, 3, 4))
    book.come(5)
    assert book.have_given_back([2])
    assert [book.is_present(rank) for rank in (0, 2, 5)] == [True, False, True]
    assert book.epochs == {0: 1, 1: 1, 2: 1}
    again = LaneBook(1)
    again.resume(json.loads(json.dumps(book.plain)))
    assert again.left_over([1, 2]) == book.left_over([2]) == (LaneBatch(1, 3, 2, 3),)
    assert book.left_over([1]) == ()
    assert "in epoch 1, of lane 2, from batch 3 on" in in_words(book.left_over([2]))
