"""Asynchronous workers die, leave and come in any order, while messages take as long as chance wants: what counts of
those who are gone is what the models of those who are there have, and gradients are shared out anew among these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.elastic import Done
from paceline.layout import TensorSpec, by_group
from paceline.strategies.gossip.pairing import Pairing, askers
from paceline.strategies.gossip.parcel import Parcel
from paceline.strategies.gossip.reunion import Agreed, Word, agree
from paceline.topology import Chain

MOST = 12
LAYOUT = by_group([TensorSpec("x", (MOST,), torch.float64)])


@dataclass
class Worker:
    """Its model has an element for each worker, which each gradient of that one raises by 1, so that it is above 0 as
    soon as the model has any; `has` says of whom it has how many."""

    rank: int
    pairing: Pairing
    has: dict[int, int] = field(default_factory=dict)
    applied: int = 0


class Letter(NamedTuple):
    sender: int
    receiver: int
    message: torch.Tensor
    has: dict[int, int]


class World:
    """Workers, and messages under way. An oracle beside them follows which gradients each model has."""

    def __init__(self, size: int) -> None:
        self.workers: dict[int, Worker] = {}
        self.letters: list[Letter] = []
        self.gone: dict[int, tuple[int, Done]] = {}
        self.num = size
        self._form({rank: Worker(rank, Pairing(Parcel(LAYOUT), rank=0, size=1)) for rank in range(size)}, {})

    def step(self, rank: int, choice: int) -> None:
        """As `AsynchronousGossip` does it; a worker that waits for its answer does nothing."""
        worker = self.workers[rank]
        if worker.pairing.asked is not None:
            return
        place = self.ranks.index(rank)
        worker.applied += 1
        worker.pairing.counts[place] += 1
        worker.pairing.model.values[0][rank] += 1
        worker.pairing.done[place] = Done(own=worker.applied, steps=worker.applied)
        worker.has[rank] = worker.applied
        near = sorted(Chain().neighbours(0, place, len(self.ranks)).sends_to)
        if near and askers(Chain(), len(self.ranks))[place]:
            other = near[choice % len(near)]
            self.letters.append(Letter(rank, self.ranks[other], worker.pairing.ask(other), {**worker.has}))

    def deliver(self, number: int) -> None:
        """Of two workers messages come in order."""
        letter = self.letters[number % len(self.letters)]
        letter = next(each for each in self.letters if each[:2] == letter[:2])
        self.letters.remove(letter)
        worker = self.workers.get(letter.receiver)
        if worker is None:
            return
        before = {**worker.has}
        answers = worker.pairing.receive(self.ranks.index(letter.sender), letter.message)
        self.letters += [Letter(letter.receiver, self.ranks[to], answer, before) for to, answer in answers]
        for rank, number in letter.has.items():
            worker.has[rank] = max(number, worker.has.get(rank, 0))

    def change(self, dead: list[int], joins: bool) -> None:
        """Some are gone, and another may join: all answers of the living come first, and nothing else may."""
        for rank in dead:
            del self.workers[rank]
        for worker in self.workers.values():
            while worker.pairing.asked is not None and self.ranks[worker.pairing.asked] in self.workers:
                other = self.ranks[worker.pairing.asked]
                pair = {(worker.rank, other), (other, worker.rank)}
                self.deliver(next(i for i, each in enumerate(self.letters) if each[:2] in pair))
        self.letters.clear()
        left, taken = {**self.workers}, {}
        if joins:
            giver = next(iter(left.values()))
            taken = dict(zip(self.ranks, giver.pairing.done, strict=True))
            newcomer = Worker(self.num, Pairing(giver.pairing.model.alike(), rank=0, size=1), {**giver.has})
            newcomer.pairing.model.buffer.copy_(giver.pairing.model.buffer)
            left[self.num], self.num = newcomer, self.num + 1
        self._form(left, taken)

    def _form(self, workers: dict[int, Worker], taken: dict[int, Done]) -> None:
        before = getattr(self, "ranks", sorted(workers))
        known: dict[int, dict[int, Done]] = {}
        words = []
        for rank in sorted(workers):
            pairing, is_new = workers[rank].pairing, rank not in before
            is_first = not hasattr(self, "ranks")
            counts = {other: count for other, (count, _) in self.gone.items()}
            counts |= {rank: 0} if is_new or is_first else dict(zip(before, pairing.counts, strict=True))
            mine = {} if is_first else dict(taken) if is_new else dict(zip(before, pairing.done, strict=True))
            known[rank] = mine
            others = {other: done for other, done in mine.items() if other != rank}
            others = {other: done for other, (_, done) in self.gone.items()} | others
            words.append(
                Word(
                    rank=rank,
                    began_at=-1 if is_new else 0,
                    counts=counts,
                    done=others,
                    computes=not is_new,
                    trains=True,
                    has_left=False,
                    dealt_until=1000,
                    stop=False,
                )
            )
        everyone = [Word.of_plain(word.plain) for word in words]
        self.agreed = agree(everyone)
        self._require(self.agreed, workers, before)
        self.gone = {rank: (self.agreed.counts[rank], done) for rank, done in self.agreed.gone.items()}
        self.ranks = sorted(workers)
        for place, rank in enumerate(self.ranks):
            done = [known[rank].get(other, Done()) for other in self.ranks]
            pairing = Pairing(workers[rank].pairing.model, rank=place, size=len(self.ranks), done=done)
            pairing.counts = [self.agreed.counts[other] for other in self.ranks]
            pairing.left, pairing.is_in = self.agreed.shares[place], True
            workers[rank].pairing = pairing
        self.workers = workers

    def _require(self, agreed: Agreed, workers: dict[int, Worker], before: list[int]) -> None:
        """What the oracle knows."""
        for rank in {*before} - {*workers}:
            has = max(each.has.get(rank, 0) for each in workers.values())
            assert agreed.gone[rank].own == has, (rank, has)
            assert any(each.pairing.model.values[0][rank] > 0 for each in workers.values()) == (has > 0)
        for rank, done in self.gone.items():
            assert agreed.gone[rank[0] if isinstance(rank, tuple) else rank] == done[1], "what was agreed stays"
        num_computed = sum(rank in before for rank in workers)
        assert agreed.iteration + num_computed + sum(agreed.shares.values()) == 1000


@settings(max_examples=300, deadline=None)
@given(data=st.data(), size=st.integers(1, 5))
def test_of_the_dead_counts_what_the_living_have(data: st.DataObject, size: int) -> None:
    world = World(size)
    for _ in range(data.draw(st.integers(0, 60))):
        what = data.draw(st.sampled_from(["step", "step", "step", "deliver", "deliver", "deliver", "change"]))
        ranks = world.ranks
        if what == "step":
            world.step(data.draw(st.sampled_from(ranks)), data.draw(st.integers(0, 9)))
        elif what == "deliver" and world.letters:
            world.deliver(data.draw(st.integers(0, len(world.letters) - 1)))
        elif what == "change":
            dead = data.draw(st.lists(st.sampled_from(ranks), unique=True, max_size=len(ranks) - 1))
            joins = world.num < MOST and data.draw(st.booleans())
            world.change(dead, joins)
            assert all(worker.pairing.asked is None for worker in world.workers.values())


def test_who_is_in_a_pause_gets_no_share() -> None:
    """It would not use it, and all would come to the pause too early."""
    done = Done(own=3, steps=3)
    word = Word(
        rank=0, began_at=10, counts={0: 5, 1: 2, 2: 4}, done={1: Done(), 2: done}, computes=True, trains=True,
        has_left=False, dealt_until=40, stop=False,
    )  # fmt: skip
    pausing = Word(
        rank=1, began_at=10, counts={0: 4, 1: 3, 2: 4}, done={0: Done(own=4, steps=4), 2: Done()}, computes=False,
        trains=False, has_left=True, dealt_until=0, stop=True,
    )  # fmt: skip
    agreed = agree([word, pausing])
    assert (agreed.iteration, agreed.gone, agreed.active, agreed.stop) == (22, {2: done}, [0], True)
    assert agreed.shares == {0: 40 - 22 - 1}


@pytest.mark.parametrize("told", [False, True])
def test_a_message_says_how_far_each_is(told: bool) -> None:
    first, second = (Pairing(Parcel(LAYOUT), rank=rank, size=2, done=[Done()] * 2 if told else []) for rank in range(2))
    if told:
        first.done[0] = Done(2, 5, 8, 1, 44, 11)
    ((_, answer),) = second.receive(0, first.ask(1))
    assert first.receive(1, answer) == []
    assert second.done == ([Done(2, 5, 8, 1, 44, 11), Done()] if told else [])
    assert len(answer) == LAYOUT.num_bytes + 8 * (4 + 2 + 12 * told)
