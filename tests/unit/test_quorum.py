"""Rounds of a quorum: which changes make one, and that all shards agree on it whatever comes first."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.membership import Membership
from paceline.server.admission import ProtocolError, Quorum
from paceline.server.shard import Shard

SELDOM = 1_000_000


def rule_of(workers: int, quorum: int, grace_s: float = 0.0) -> Quorum:
    rule = Quorum(Membership(1, tuple(range(workers))), quorum=quorum, grace_s=grace_s)
    rule.expect_pause(SELDOM)
    return rule


def test_first_changes_make_a_round_and_late_ones_count_in_the_next() -> None:
    rule = rule_of(4, 2)
    assert rule.push(2, 0) == ()
    assert rule.is_held(2)
    assert not rule.is_admitted(2)
    assert rule.push(0, 0) == (0, 2)
    assert rule.contributors == (0, 2)
    assert rule.clock_of(0) == 1
    assert rule.push(3, 0) == ()  # of the clock before
    assert rule.push(1, 0) == (1, 3)
    assert rule.clock_of(2) == 2


def test_last_round_before_a_pause_is_of_everybody() -> None:
    rule = rule_of(3, 1)
    rule.expect_pause(2)
    assert rule.push(0, 0) == (0,)
    rule.expect_pause(1)
    assert rule.push(0, 1) == ()
    assert rule.push(1, 0) == ()
    assert rule.push(2, 0) == (0, 1, 2)


def test_quorum_is_of_those_who_are_left() -> None:
    rule = rule_of(3, 3)
    rule.push(0, 0)
    assert rule.leave(1) == ()
    assert rule.leave(2) == (0,)
    assert rule.push(0, 1) == (0,)


def test_a_round_does_not_wait_for_workers_at_a_place() -> None:
    rule = rule_of(3, 2)
    assert rule.push(0, 0) == ()
    assert rule.step_aside(1) == ()
    assert rule.step_aside(2) == (0,)
    rule.expect_pause(1)
    assert rule.push(0, 1) == (0,), "nor does the last one before a pause"
    for worker in (1, 2):
        rule.come_back(worker)
    rule.expect_pause(SELDOM)
    assert rule.push(1, 0) == ()
    assert rule.push(0, 2) == (0, 1)
    rule.leave(2)
    with pytest.raises(ProtocolError, match="worker 2 is none of the active workers"):
        rule.step_aside(2)


def test_what_the_dead_have_given_waits_for_somebody_who_tells_the_others() -> None:
    rule = rule_of(4, 2)
    rule.push(0, 0)
    assert rule.leave(0) == ()
    rule.step_aside(1)
    assert rule.leave(2) == ()
    assert rule.step_aside(3) == ()
    rule.come_back(3)
    assert rule.push(3, 0) == (0, 3)
    rule.come_back(1)
    rule.push(3, 1)
    assert rule.leave(3) == ()
    assert rule.leave(1) == (3,), "nobody is left to tell, and all shards do so"


def test_grace_of_a_round_that_only_the_dead_have_given_to_does_not_begin() -> None:
    rule = rule_of(3, 1, grace_s=0.5)
    rule.push(0, 0)
    rule.tick(1.0)
    rule.leave(0)
    assert rule.tick(2.0) == ()
    rule.push(1, 0)
    assert rule.tick(3.0) == ()
    assert rule.tick(3.5) == (0, 1)


def test_decisions_are_kept_until_all_shards_are_known_to_have_them() -> None:
    rule = rule_of(3, 1)
    follower = rule.for_another_shard()
    for clock in range(2):
        rule.push(0, clock)
    assert rule.decided == {1: (0,)}
    rule.push(1, 0)
    assert rule.decided == {1: (0,), 2: (1,)}, "worker 1 is answered for clock 0 alone"
    for clock in range(2):
        assert follower.push(0, clock) == ()
        assert follower.follow(0, clock + 1, (0,)) == (0,)
    assert follower.learn(rule.decided) == ()
    assert follower.push(1, 0) == (1,)
    assert follower.learn(rule.decided) == (), "nothing is done a second time"


def test_who_joins_pushes_for_the_clock_at_which_all_shards_expect_it() -> None:
    rule = rule_of(2, 1)
    follower = rule.for_another_shard()
    rule.push(0, 0)
    for each in (rule, follower):
        each.join(2)
    clock = max(rule.clock_of(2), follower.clock_of(2))
    assert clock == 1
    for each in (rule, follower):
        assert each.begin_with(2, clock) == ()
    rule.push(1, 0)
    assert rule.is_admitted(2)
    assert rule.clock_of(2) == 1
    assert not follower.is_admitted(2)
    assert follower.push(0, 0) == ()
    assert follower.learn(rule.decided) == (0,)
    assert follower.is_admitted(2)
    assert rule.push(2, 1) == (2,)
    assert rule.clock_of(2) == 3
    assert follower.push(2, 1) == ()
    assert follower.follow(2, 3, (2,)) == ()
    assert follower.push(1, 0) == (1,)
    assert follower.due() == (2,)
    with pytest.raises(ProtocolError, match="takes part already"):
        rule.join(2)


def test_grace_begins_with_the_quorum_and_ends_by_the_clock_or_with_all() -> None:
    rule = rule_of(3, 2, grace_s=0.5)
    rule.push(0, 0)
    assert rule.tick(1.0) == ()
    assert rule.wakes_at_s is None
    assert rule.push(1, 0) == ()
    assert rule.tick(2.0) == ()
    assert rule.wakes_at_s == 2.5
    assert rule.tick(2.4) == ()
    assert rule.tick(2.5) == (0, 1)
    assert rule.wakes_at_s is None
    rule.push(0, 1)
    rule.push(1, 1)
    rule.tick(3.0)
    assert rule.push(2, 0) == (0, 1, 2)
    assert rule.tick(4.0) == ()


def test_grace_ends_no_round_that_a_pause_follows() -> None:
    rule = rule_of(3, 2, grace_s=0.5)
    rule.expect_pause(1)
    rule.push(0, 0)
    rule.push(1, 0)
    assert rule.tick(2.0) == ()
    assert rule.wakes_at_s is None
    assert rule.push(2, 0) == (0, 1, 2)


@pytest.mark.parametrize(("quorum", "grace_s"), [(0, 0.0), (4, 0.0), (2, -1.0), (2, float("inf"))])
def test_numbers_out_of_range(quorum: int, grace_s: float) -> None:
    with pytest.raises(ValueError, match="quorum must be in"):
        rule_of(3, quorum, grace_s)


def test_worker_pushes_once_until_it_may_go_on() -> None:
    rule = rule_of(3, 2)
    rule.push(0, 0)
    with pytest.raises(ProtocolError, match="worker 0 pushed for clock 0"):
        rule.push(0, 0)


@given(st.integers(2, 5), st.data(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_all_shards_make_the_same_rounds(workers: int, data: st.DataObject, order: random.Random) -> None:
    """Messages to three shards overtake one another; each worker has five changes to give, and then leaves."""
    quorum = data.draw(st.integers(1, workers))
    first = rule_of(workers, quorum)
    rules = [first, first.for_another_shard(), first.for_another_shard()]
    rounds: list[list[tuple[int, ...]]] = [[] for _ in rules]
    at = dict.fromkeys(range(workers), 0)  # the clock that a worker is told
    given_ = dict.fromkeys(range(workers), 0)
    under_way: list[tuple[str, int, int, tuple[int, ...]]] = []  # what, to which shard, from whom
    answered: dict[int, set[int]] = defaultdict(set)
    decision: dict[int, tuple[int, tuple[int, ...]]] = {}

    def made(shard: int, senders: tuple[int, ...]) -> None:
        while senders:
            rounds[shard].append(senders)
            senders = rules[shard].due()
        for worker in range(workers):
            is_pending = given_[worker] > 0 and shard not in answered[worker] and worker in pushed[shard]
            if is_pending and rules[shard].is_admitted(worker):
                answered[worker].add(shard)
                pushed[shard].discard(worker)
                if shard == 0:
                    decision[worker] = (first.clock_of(worker), first.contributors or ())
                    under_way.extend(("follow", other, worker, ()) for other in (1, 2))

    pushed: list[set[int]] = [set(), set(), set()]

    def begin(worker: int) -> None:
        answered[worker].clear()
        given_[worker] += 1
        under_way.extend(("push", shard, worker, ()) for shard in range(3))

    for worker in range(workers):
        begin(worker)
    while under_way:
        # A worker's messages to one shard keep their order.
        index = order.randrange(len(under_way))
        _, shard, worker, _ = under_way[index]
        index = next(i for i, each in enumerate(under_way) if each[1:3] == (shard, worker))
        what, shard, worker, _ = under_way.pop(index)
        if what == "push":
            pushed[shard].add(worker)
            made(shard, rules[shard].push(worker, at[worker]))
        elif what == "follow":
            made(shard, rules[shard].follow(worker, *decision[worker]))
        else:
            made(shard, rules[shard].leave(worker))
        for each in range(workers):
            if len(answered[each]) == 3 and given_[each] <= 5:
                answered[each].clear()
                at[each] = decision[each][0]
                if given_[each] < 5:
                    begin(each)
                else:
                    given_[each] += 1
                    under_way.extend(("leave", other, each, ()) for other in range(3))
    assert rounds[0] == rounds[1] == rounds[2]
    assert sum(map(len, rounds[0])) == 5 * workers, "every change counts once"


def test_changes_count_by_their_samples() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    shard = Shard(
        parameters=[parameter],
        optimizer=torch.optim.SGD([parameter], lr=1.0),
        rule=Quorum(Membership(1, (0, 1, 2)), quorum=2),
    )
    shard.push(0, 0, [torch.tensor([1.0], dtype=torch.float64)], pause_at=SELDOM, weight=3.0)
    answers = shard.push(1, 0, [torch.tensor([5.0], dtype=torch.float64)], pause_at=SELDOM, weight=1.0)
    assert {answer.worker for answer in answers} == {0, 1}
    assert parameter.item() == -(3 * 1.0 + 1 * 5.0) / 4
