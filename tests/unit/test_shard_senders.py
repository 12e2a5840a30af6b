"""Many senders, few workers: what a shard keeps of the contributions of senders that one worker plays in turn."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.aggregate import MEAN, Aggregator, Median
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule
from paceline.server.shard import Shard
from tests.unit.test_shard import NEVER, SHAPES, make_shard, ones


class Rounds(AdmissionRule):
    """Worker w plays senders w, w + n and so on, each once a round."""

    def __init__(self, members: Membership, num_senders: int) -> None:
        super().__init__(members)
        self._due, self._here, self._clock = set(range(num_senders)), set[int](), 0

    def for_another_shard(self) -> AdmissionRule:
        raise AssertionError("there is one shard")

    def worker_of(self, sender: int) -> int:
        return sender % self.members.size

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        self._due.remove(sender)
        self._here.add(sender)
        return self._close_if_full()

    def is_held(self, sender: int) -> bool:
        return sender in self._here

    def is_admitted(self, worker: int) -> bool:
        return any(self.worker_of(sender) == worker for sender in self._due)

    def clock_of(self, worker: int) -> int:
        return self._clock

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        return ()

    def _close_if_full(self) -> tuple[int, ...]:
        if self._due:
            return ()
        complete = tuple(sorted(self._here))
        self._due, self._here, self._clock = self._here, set(), self._clock + 1
        return complete


@pytest.mark.parametrize(("aggregator", "most_held"), [(MEAN, 2 * 2), (Median(), 40)], ids=["mean", "median"])
def test_many_senders_cost_a_copy_a_worker_where_the_aggregator_streams(aggregator: Aggregator, most_held: int) -> None:
    """Whichever worker comes first, the bits are the same."""
    num_senders, num_rounds = 40, 2
    generator = torch.Generator().manual_seed(0)
    given = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(num_senders)]
    weights = [1.0 + sender % 3 for sender in range(num_senders)]
    models = []
    for seed in range(3):
        parameters = [torch.zeros(shape) for shape in SHAPES]
        rule = Rounds(Membership.first(2), num_senders)
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        shard = Shard(parameters=parameters, optimizer=optimizer, rule=rule, aggregator=aggregator)
        memory = [ones(), ones()]
        randomness, held = random.Random(seed), 0
        for clock in range(num_rounds):
            turns = [list(range(worker, num_senders, 2)) for worker in range(2)]
            while any(turns):
                worker = randomness.choice([w for w in range(2) if turns[w]])
                sender = turns[worker].pop(0)
                for own, new in zip(memory[worker], given[sender], strict=True):
                    own.copy_(new)
                shard.push(
                    worker, clock, memory[worker], pause_at=NEVER, sender=sender, weight=weights[sender], kind="delta"
                )
                held = max(held, sum(each.contribution is not None for each in shard._given.values()))
        assert shard.iteration == num_rounds
        assert held <= most_held
        models.append([parameter.clone() for parameter in parameters])
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(model, models[0], strict=True))
    if aggregator is MEAN:
        for index, parameter in enumerate(models[0]):
            total = sum(w * tensors[index].double() for w, tensors in zip(weights, given, strict=True))
            torch.testing.assert_close(parameter.double(), num_rounds * total / sum(weights), rtol=1e-5, atol=1e-6)


def test_a_round_with_a_void_contribution_leaves_nothing_of_it_to_the_next() -> None:
    shard = make_shard(Rounds(Membership.first(1), 3))
    for clock, values in enumerate([(1.0, None, 3.0), (4.0, 5.0, 9.0)]):
        for sender, value in enumerate(values):
            shard.push(0, clock, None if value is None else ones(value), pause_at=NEVER, sender=sender)
    assert shard.iteration == 1
    torch.testing.assert_close(shard.parameters, ones(-6.0))
