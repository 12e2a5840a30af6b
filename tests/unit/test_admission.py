"""Admission rules alone: which gradients form an update, and who may go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, BulkSynchronous, Following, ProtocolError, StaleSynchronous

RULES = {
    "bsp": lambda n: BulkSynchronous(Membership.first(n)),
    "backup": lambda n: BulkSynchronous(Membership.first(n), backup_workers=n - 1),
    "ssp": lambda n: StaleSynchronous(Membership.first(n), staleness=2),
    "asp": lambda n: StaleSynchronous(Membership.first(n)),
}


def push(rule: AdmissionRule, worker: int) -> tuple[int, ...]:
    return rule.push(worker, rule.clock_of(worker))


# --- bulk synchronous ----------------------------------------------------------------------------------------------


def test_bsp_closes_a_clock_only_with_the_last_worker() -> None:
    rule = BulkSynchronous(Membership.first(3))
    for clock in range(4):
        assert push(rule, 2) == ()
        assert push(rule, 0) == ()
        assert rule.is_held(2)
        assert rule.is_held(0)
        assert [rule.is_admitted(worker) for worker in range(3)] == [False, True, False]
        assert push(rule, 1) == (0, 1, 2)
        assert all(rule.is_admitted(worker) and not rule.is_held(worker) for worker in range(3))
        assert {rule.clock_of(worker) for worker in range(3)} == {clock + 1}


@given(n=st.integers(1, 6), data=st.data())
def test_bsp_updates_with_everyone_in_any_order(n: int, data: st.DataObject) -> None:
    rule = BulkSynchronous(Membership.first(n))
    for _ in range(3):
        order = data.draw(st.permutations(range(n)))
        formed = [push(rule, worker) for worker in order]
        assert formed == [()] * (n - 1) + [tuple(range(n))]


def test_backup_workers_the_first_count_and_the_late_jump_ahead() -> None:
    rule = BulkSynchronous(Membership.first(4), backup_workers=2)
    assert rule.push(3, 0) == ()
    assert rule.push(1, 0) == (1, 3)
    # Workers 0 and 2 have missed clock 0: dropped, not held, and sent on to the clock that is open.
    assert rule.push(0, 0) == ()
    assert not rule.is_held(0)
    assert rule.is_admitted(0)
    assert rule.clock_of(0) == 1
    assert rule.push(0, 1) == ()
    assert rule.is_held(0)
    # A worker that is two clocks late jumps as well.
    assert rule.push(1, 1) == (0, 1)
    assert rule.push(2, 0) == ()
    assert rule.clock_of(2) == 2


@given(n=st.integers(1, 6), data=st.data())
def test_backup_workers_every_update_has_exactly_n_minus_b(n: int, data: st.DataObject) -> None:
    b = data.draw(st.integers(0, n - 1))
    rule = BulkSynchronous(Membership.first(n), backup_workers=b)
    known = [0] * n  # the clock each worker was last told
    num_updates = 0
    for _ in range(40):
        free = [worker for worker in range(n) if not rule.is_held(worker)]
        assert len(free) > b or n == len(free)
        worker = data.draw(st.sampled_from(free))
        was_late = known[worker] < num_updates
        formed = rule.push(worker, known[worker])
        assert not (was_late and (formed or rule.is_held(worker)))
        if formed:
            num_updates += 1
            assert len(formed) == n - b
            assert worker in formed
        for other in {worker, *formed}:
            if not rule.is_held(other):
                known[other] = rule.clock_of(other)


def test_bsp_leaving_closes_the_clock_that_waits_only_for_the_leaver() -> None:
    rule = BulkSynchronous(Membership.first(3))
    push(rule, 0)
    push(rule, 1)
    assert rule.leave(2) == (0, 1)
    assert push(rule, 1) == ()
    assert push(rule, 0) == (0, 1)
    assert rule.leave(0) == ()
    assert push(rule, 1) == (1,)
    assert rule.leave(1) == ()


def test_bsp_the_gradient_of_a_worker_that_left_still_counts() -> None:
    rule = BulkSynchronous(Membership.first(2))
    push(rule, 0)
    assert rule.leave(0) == ()
    assert push(rule, 1) == (0, 1)


@pytest.mark.parametrize("clock", [1, 7])
def test_bsp_refuses_a_future_clock(clock: int) -> None:
    with pytest.raises(ProtocolError, match=f"worker 1 pushed for clock {clock} while clock 0"):
        BulkSynchronous(Membership.first(2)).push(1, clock)


def test_bsp_refuses_a_second_gradient_for_a_clock() -> None:
    rule = BulkSynchronous(Membership.first(2))
    push(rule, 0)
    with pytest.raises(ProtocolError):
        rule.push(0, 0)
    assert push(rule, 1) == (0, 1), "the refused push changed nothing"


def test_backup_workers_the_first_to_leave_ends_it_for_all() -> None:
    rule = BulkSynchronous(Membership.first(3), backup_workers=1)
    push(rule, 0)
    assert not rule.is_over
    assert rule.leave(2) == (0,), "the gradient that waited for the leaver alone still counts"
    assert rule.is_over
    assert push(rule, 1) == ()
    assert not rule.is_held(1)
    assert rule.is_admitted(1)


def test_with_backup_workers_the_first_at_a_place_ends_updates_until_all_have_come() -> None:
    rule = BulkSynchronous(Membership.first(3), backup_workers=1)
    assert push(rule, 1) == ()
    assert rule.step_aside(0) == ()
    for _ in range(3):
        assert rule.is_admitted(1), "what it has given counts for nothing, and it goes on"
        assert push(rule, 1) == ()
    assert rule.clock_of(1) == 0
    for worker in (1, 2):
        assert rule.step_aside(worker) == ()
    for worker in range(3):
        rule.come_back(worker)
    assert push(rule, 2) == ()
    assert push(rule, 0) == (0, 2)


def test_only_backup_workers_make_shards_follow() -> None:
    deciding = BulkSynchronous(Membership.first(3), backup_workers=1)
    assert isinstance(deciding.for_another_shard(), Following)
    assert deciding.contributors == ()
    push(deciding, 2)
    push(deciding, 0)
    assert deciding.contributors == (0, 2)
    for name in ("bsp", "ssp", "asp"):
        rule = RULES[name](3)
        push(rule, 0)
        other = rule.for_another_shard()
        assert type(other) is type(rule)
        assert other.clock_of(0) == 0, "a state of its own"
        assert rule.contributors is None
    ssp = StaleSynchronous(Membership.first(2), staleness=1, torn_reads=True).for_another_shard()
    assert ssp.torn_reads
    push(ssp, 0)
    push(ssp, 0)
    assert not ssp.is_admitted(0)


# --- stale synchronous ---------------------------------------------------------------------------------------------


@given(n=st.integers(1, 6), staleness=st.integers(0, 4), data=st.data())
def test_ssp_bound_holds_and_somebody_can_always_go_on(n: int, staleness: int, data: st.DataObject) -> None:
    rule = StaleSynchronous(Membership.first(n), staleness=staleness)
    clocks = dict.fromkeys(range(n), 0)
    weights = data.draw(st.lists(st.integers(1, 50), min_size=n, max_size=n), label="speeds")
    schedule = [worker for worker in range(n) for _ in range(weights[worker])]
    for _ in range(60):
        admitted = {worker for worker in clocks if rule.is_admitted(worker)}
        # The definition: a worker at clock c may compute while the slowest is at c - s or further.
        assert admitted == {w for w, clock in clocks.items() if clock - min(clocks.values()) <= staleness}
        assert admitted, "deadlock"
        worker = data.draw(st.sampled_from([w for w in schedule if w in admitted]))
        if len(clocks) > 1 and data.draw(st.integers(0, 30)) == 0:
            assert rule.leave(worker) == ()
            del clocks[worker]
            continue
        assert push(rule, worker) == (worker,)
        clocks[worker] += 1
        assert rule.clock_of(worker) == clocks[worker]
        assert max(clocks.values()) - min(clocks.values()) <= staleness + 1


def test_ssp_zero_is_lock_step() -> None:
    rule = StaleSynchronous(Membership.first(3), staleness=0)
    for _ in range(3):
        for worker in (2, 0, 1):
            assert rule.is_admitted(worker)
            push(rule, worker)
            assert rule.is_admitted(worker) == (worker == 1)
    assert all(rule.is_admitted(worker) for worker in range(3))


def test_ssp_staleness_two_lets_the_fast_one_start_its_third_clock_ahead_of_none() -> None:
    rule = StaleSynchronous(Membership.first(2), staleness=2)
    for _ in range(2):
        push(rule, 0)
        assert rule.is_admitted(0)
    push(rule, 0)
    assert not rule.is_admitted(0)
    with pytest.raises(ProtocolError, match="without having been admitted"):
        push(rule, 0)
    push(rule, 1)
    assert rule.is_admitted(0)


def test_asp_never_waits() -> None:
    rule = StaleSynchronous(Membership.first(2))
    for _ in range(1000):
        push(rule, 0)
        assert rule.is_admitted(0)


def test_ssp_nobody_waits_for_a_worker_that_left() -> None:
    rule = StaleSynchronous(Membership.first(3), staleness=1)
    push(rule, 1)
    for _ in range(2):
        push(rule, 0)
    assert not rule.is_admitted(0)
    rule.leave(2)
    assert rule.is_admitted(0)
    rule.leave(1)
    for _ in range(10):
        push(rule, 0)
    assert rule.is_admitted(0)


@pytest.mark.parametrize("clock", [-1, 1, 5])
def test_ssp_refuses_a_clock_that_is_not_the_workers(clock: int) -> None:
    with pytest.raises(ProtocolError, match=rf"worker 1 pushed for clock {clock}, but is at 0"):
        StaleSynchronous(Membership.first(2)).push(1, clock)


# --- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("stranger", [-1, 3])
def test_a_worker_that_never_was_is_refused(name: str, stranger: int) -> None:
    with pytest.raises(ProtocolError, match="none of the active workers"):
        RULES[name](3).push(stranger, 0)


@pytest.mark.parametrize("name", RULES)
def test_a_worker_that_left_is_refused(name: str) -> None:
    rule = RULES[name](3)
    rule.leave(1)
    with pytest.raises(ProtocolError, match="none of the active workers"):
        rule.push(1, 0)


def test_settings_out_of_range() -> None:
    for num_workers, backup_workers in ((2, 2), (2, -1)):
        with pytest.raises(ValueError, match=r"_workers must be"):
            BulkSynchronous(Membership.first(num_workers), backup_workers=backup_workers)
    for staleness in (-1, math.nan):
        with pytest.raises(ValueError, match="staleness must be"):
            StaleSynchronous(Membership.first(1), staleness=staleness)


@pytest.mark.parametrize(
    ("clock", "contributors"),
    [("x", (0, 1)), (True, (0, 1)), (float("inf"), (0, 1)), (0, (0, 1)), (2, ([1],)), (2, (0, 99)), (2, (0, 0))],
)
def test_a_follower_refuses_what_nobody_can_have_decided(clock: Any, contributors: Any) -> None:
    rule = Following(Membership.first(3))
    for clock_before in range(2):
        for worker in range(2):
            assert rule.push(worker, clock_before) == ()
        if clock_before == 0:
            assert rule.follow(0, 1, (0, 1)) == (0, 1)
            assert rule.follow(1, 1, (0, 1)) == ()
    with pytest.raises(ProtocolError, match="cannot go on"):
        rule.follow(0, clock, contributors)
    assert rule.is_held(0)
    assert rule.follow(0, 2, (0, 1)) == (0, 1)  # nothing was changed by what was refused
