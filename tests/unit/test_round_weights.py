"""How much counts what workers change in fragments, whoever dies meanwhile: as many samples as each has had of all
batches since the fragment left it last."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.elastic import Cursor, Deal
from paceline.membership import Membership
from paceline.schedule import Rounds
from paceline.strategies.base import Recovery
from paceline.strategies.round_weights import RoundWeights
from paceline.training.sharding.dealt import Dealt


class Data:
    """As `Recovery`, of one worker, and all batches that there were, as those who are there now would have had them."""

    def __init__(self, num_workers: int) -> None:
        self.ranks = list(range(num_workers))
        membership = Membership.first(num_workers)
        self.dealt = Dealt(cast(Any, None), rank=0, membership=membership, global_batch="grow", end_pass=lambda: True)
        self.all: list[Deal] = []

    def deal(self, sizes: list[int]) -> float:
        """One batch, of so many samples for each. Returns the weight that this worker's is handed out with."""
        parts = tuple(tuple(range(size)) for size in sizes)
        dealt = Deal(parts, sum(sizes), True, Cursor())
        self.all.append(dealt)
        self.dealt.under_way = (*self.dealt.under_way, dealt)
        return dealt.weight(0)

    def lose(self, place: int) -> None:
        del self.ranks[place]
        self.dealt.resize(Membership(self.dealt._membership.epoch + 1, tuple(self.ranks)))
        self.all = [each.without([place], global_batch="grow") for each in self.all]

    def mean(self, first: int, stop: int) -> list[float]:
        return [fmean(each.weight(place) for each in self.all[first:stop]) for place in range(len(self.ranks))]

    @property
    def num_dealt(self) -> int:
        return self.dealt.num_dealt

    def weight_of(self, first: int, stop: int) -> float:
        return self.dealt.weight(first, stop)

    def weights_of(self, first: int, stop: int) -> tuple[float, ...]:
        return self.dealt.weights(first, stop)


@given(
    randomness=st.integers(0, 2**32).map(random.Random),
    every=st.integers(1, 9),
    fragments=st.integers(1, 4),
    delay=st.integers(0, 8),
    single=st.integers(0, 2),
    warmup=st.integers(0, 3),
    deaths=st.sets(st.integers(1, 40), max_size=3),
)
def test_weights_are_of_all_batches_since_a_fragment_left(
    randomness: random.Random, every: int, fragments: int, delay: int, single: int, warmup: int, deaths: set[int]
) -> None:
    """A death is noticed where an exchange is due. Each fragment is joined before another leaves, so that all batches
    that may be asked for are since one of them left last."""
    assume(fragments <= every and delay < every // fragments)
    schedule = Rounds(every=every, fragments=fragments, delay=delay, single=single, warmup=warmup)
    data = Data(num_workers=4)
    weights = RoundWeights(fragments, cast(Recovery, data))
    first, stop = dict.fromkeys(range(fragments), 0), dict.fromkeys(range(fragments), 0)
    is_dead = False
    for step in range(1, 41):
        weights.step(data.deal([randomness.randint(1, 5) for _ in data.ranks]))
        is_dead = is_dead or (step in deaths and len(data.ranks) > 1)
        for fragment in schedule.leaving(step):
            weights.leave(fragment)
            stop[fragment] = step
        due = schedule.due(step)
        if due and is_dead:
            data.lose(randomness.randrange(1, len(data.ranks)))
            weights.regroup()
            is_dead = False
        for fragment in due:
            wanted = data.mean(first[fragment], stop[fragment])
            assert weights.of(fragment) == pytest.approx(wanted[0])
            assert weights.of_all(fragment) == pytest.approx(wanted)
            weights.join(fragment)
            first[fragment] = stop[fragment]
        if due:
            assert not any(map(weights.has_left, range(fragments)))
            data.dealt.commit(asks_from=weights.asks_from)
