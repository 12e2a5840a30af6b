"""A copy of a shard that is told where another one stands goes on as that one does."""

from __future__ import annotations

import json

import torch

from paceline.membership import Membership
from paceline.server import standing
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.shard import Shard

FOREVER = 10**9
BOTH = Membership(1, (0, 1))


def shard_of(rule: AdmissionRule) -> Shard:
    parameters = [torch.zeros(3)]
    shard = Shard(parameters=parameters, optimizer=torch.optim.SGD(parameters, lr=1.0), rule=rule)
    shard.before_closing = lambda closed: None
    return shard


def copy_of(shard: Shard) -> Shard:
    """Told in the words that servers use."""
    copy = shard_of(shard.rule.for_another_shard())
    copy.parameters[0].copy_(shard.parameters[0])
    copy.stand(standing.from_body(json.loads(json.dumps(standing.to_body(shard.standing())))))
    return copy


def push(shard: Shard, worker: int, clock: int, *, lr: float | None = None) -> list[int]:
    """Returns who is answered."""
    groups = None if lr is None else [{"lr": lr}]
    answers = shard.push(worker, clock, [torch.ones(3)], pause_at=FOREVER, groups=groups)
    return [answer.worker for answer in answers]


def test_each_workers_hyperparameters_are_known() -> None:
    """One has set a learning rate once, and the other one's update was the last."""
    shard = shard_of(StaleSynchronous(BOTH))
    push(shard, 0, 0, lr=0.25)
    push(shard, 1, 0)
    copy = copy_of(shard)
    for each in (shard, copy):
        push(each, 0, 1)
    assert torch.equal(copy.parameters[0], shard.parameters[0])
    assert copy.parameters[0].tolist() == [-1.5] * 3
    assert (copy.iteration, copy.clocks()) == (shard.iteration, shard.clocks())


def test_a_gradient_that_counts_is_answered_and_not_applied_again() -> None:
    shard = shard_of(StaleSynchronous(BOTH))
    push(shard, 0, 0)
    copy = copy_of(shard)
    assert push(copy, 0, 0) == [0]
    assert copy.parameters[0].tolist() == [-1.0] * 3


def test_nobody_waits_for_who_joins_at_a_later_clock() -> None:
    shard = shard_of(BulkSynchronous(BOTH))
    shard.join(2)
    shard.begin_with(2, 1)
    copy = copy_of(shard)
    for each in (shard, copy):
        push(each, 0, 0)
        assert push(each, 1, 0) == [0, 1]
        assert push(each, 0, 1) == []


def test_who_has_left_takes_no_part() -> None:
    shard = shard_of(BulkSynchronous(BOTH))
    shard.leave(1)
    assert push(copy_of(shard), 0, 0) == [0]


def test_a_shard_is_not_copied_while_it_has_what_nobody_gives_again() -> None:
    shard = shard_of(BulkSynchronous(BOTH))
    push(shard, 1, 0)
    assert shard.is_repeatable
    shard.leave(1)  # its gradient counts with the other's
    assert not shard.is_repeatable
    push(shard, 0, 0)
    assert shard.is_repeatable
