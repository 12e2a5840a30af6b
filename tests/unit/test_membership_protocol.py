"""The protocol by which workers come, leave and die, against every order of events for 3 workers and 2 failures."""

from __future__ import annotations

import pytest

from paceline.elastic import Coordinator, Form, Lease, Member, Report, StaleEpoch
from paceline.errors import RunFailed
from paceline.membership import Membership
from tests.unit.membership_explorer import Rules, TooMany, explore


@pytest.mark.parametrize("goal", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_order_of_two_failures_among_three_breaks_a_promise(goal: int) -> None:
    """One dies in mid-step, two at once, one while others re-form, one after it has applied a step."""
    num_worlds, way = explore(Rules(), goal=goal)
    assert way is None, way
    assert num_worlds > 5000


@pytest.mark.parametrize(
    "case",
    [
        {"failures": 0},
        pytest.param({"failures": 1, "goal": 2}, marks=pytest.mark.slow),
        pytest.param({"failures": 2}, marks=pytest.mark.slow),
        pytest.param({"failures": 1, "leaves": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_order_of_a_join_with_failures_breaks_a_promise(case) -> None:
    """The joiner dies before, while and after it takes a state; who gives it dies meanwhile; others leave."""
    num_worlds, way = explore(Rules(), joins=True, **case)
    assert way is None, way
    assert num_worlds > 300


@pytest.mark.parametrize(
    "case",
    [
        {"failures": 1},
        pytest.param({"failures": 1, "leaves": 1}, marks=pytest.mark.slow),
        pytest.param({"failures": 1, "goal": 2}, marks=pytest.mark.slow),
        pytest.param({"failures": 0, "joins": True, "goal": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_messages_whoever_has_a_result_hands_it_on(case) -> None:
    """Parts reach one after another; who is silent on another host is not ended for certain, and may go on."""
    num_worlds, way = explore(Rules(shows_to_all=False, finishes=False, hands_on=True), **case)
    assert way is None, way
    assert num_worlds > 5000


@pytest.mark.slow
def test_with_messages_instead_of_shared_memory_a_step_needs_a_second_phase() -> None:
    _, way = explore(Rules(shows_to_all=False, finishes=False, confirms=True), failures=1)
    assert way is None, way


@pytest.mark.parametrize(
    ("rules", "promise"),
    [
        (Rules(finishes=False), "is applied of"),
        (Rules(kills=False), "is applied of"),
        (Rules(shows_to_all=False), "is applied of"),
    ],
    ids=["looks first", "does not kill", "sends one by one"],
)
def test_every_rule_is_needed(rules: Rules, promise: str) -> None:
    """Without it there is a way to a step that two members have applied of different parts, or to a wait for ever."""
    _, way = explore(rules, failures=1)
    assert way is not None
    print("; ".join(way))
    assert promise in way[-1]


@pytest.mark.parametrize(
    ("rules", "failures", "promise"),
    [
        (Rules(holds_back=False), 0, "rank 1 has applied a step whose result (0,) do not have"),
        (Rules(checks_epoch=False), 1, "2 has applied 0 steps and is to go on after 1"),
    ],
    ids=["gives its part after its state", "takes any state"],
)
def test_every_rule_of_joining_is_needed(rules: Rules, failures: int, promise: str) -> None:
    _, way = explore(rules, failures=failures, goal=2, joins=True)
    assert way is not None
    print("; ".join(way))
    assert promise in way[-1]


def test_without_leases_nobody_ends_who_is_expelled() -> None:
    """One waits for the others for ever; one whose others have left goes on alone."""
    rules = Rules(shows_to_all=False, finishes=False, hands_on=True, leases=False)
    _, way = explore(rules, failures=1)
    assert way is not None
    print("; ".join(way))
    assert way[-1] == "ranks [0] are expelled, and nobody ends them"


def test_more_worlds_than_expected_are_a_failure_in_words() -> None:
    """And not a machine without memory: of a protocol that never ends there is always another one."""
    with pytest.raises(
        TooMany, match=r"more than 1,000 worlds, and no end in sight; the last one by: .*gives its part"
    ):
        explore(Rules(), most_worlds=1000)


def test_a_lease_ends_before_the_coordinator_counts_it_as_ended() -> None:
    """It runs from the question; the coordinator counts from when it has come."""
    lease = Lease.granted(3.0, asked_s=10.0)
    assert [lease.has_ended(now_s=now_s) for now_s in (12.9, 13.1)] == [False, True]
    assert not Lease.granted(None, asked_s=10.0).has_ended(now_s=1e9)
    assert not Lease().has_ended(now_s=1e9)


def test_a_step_is_committed_where_all_who_are_left_have_its_result() -> None:
    membership = Membership.first(3)
    members = [Member(rank, membership).with_result().stopped() for rank in (0, 2)]
    coordinator, form = Coordinator.first(membership).died(1)
    for member in members:
        assert form is None
        coordinator, form = coordinator.hear(member.report())
    assert form == Form(Membership(2, (0, 2)), step=1)
    assert [member.formed(form) for member in members] == [(Member(rank, form.membership, 1), True) for rank in (0, 2)]


def test_what_is_of_an_older_epoch_is_refused() -> None:
    coordinator, _ = Coordinator.first(Membership.first(3)).died(1)
    coordinator, _ = coordinator.hear(Report(1, 0, 0, holds=False))
    coordinator, form = coordinator.hear(Report(1, 2, 0, holds=False))
    assert form is not None
    with pytest.raises(StaleEpoch, match="refused rank 2's report of epoch 1; this is epoch 2"):
        coordinator.hear(Report(1, 2, 0, holds=False))
    with pytest.raises(StaleEpoch, match="refused rank 1's report"):
        coordinator.hear(Report(2, 1, 0, holds=False))
    with pytest.raises(StaleEpoch, match="refused to join epoch 2"):
        Member(0, Membership(2, (0, 2))).stopped().formed(form)


def test_steps_that_do_not_fit_end_the_run() -> None:
    coordinator, _ = Coordinator.first(Membership.first(3)).died(1)
    coordinator, _ = coordinator.hear(Report(1, 0, 4, holds=False))
    with pytest.raises(RunFailed, match="ranks 0 and 2 are 4 and 2 steps far"):
        coordinator.hear(Report(1, 2, 2, holds=False))


def test_who_lacks_a_step_applies_it_before_all_go_on() -> None:
    coordinator, _ = Coordinator.first(Membership.first(3)).died(1)
    coordinator, _ = coordinator.hear(Report(1, 0, 4, holds=False))
    assert coordinator.ahead is None  # rank 2 may have it
    coordinator, form = coordinator.hear(Report(1, 2, 3, holds=False))
    assert (form, coordinator.ahead, coordinator.behind) == (None, 0, (2,))
    assert coordinator.handed_on(epoch=2, step=4) == coordinator.handed_on(epoch=1, step=3) == (coordinator, ())
    coordinator, told = coordinator.handed_on(epoch=1, step=4)
    assert (told, coordinator.ahead, coordinator.awaited) == ((2,), None, (2,))
    member = Member(2, Membership.first(3), 3).stopped()
    with pytest.raises(StaleEpoch, match="has applied 3 steps, and was handed step 3"):
        member.with_result_handed_on(3)
    _, form = coordinator.hear(member.with_result_handed_on(4).report())
    assert form == Form(Membership(2, (0, 2)), step=4)


def test_whoever_is_at_the_end_of_a_meeting_that_others_have_left_leaves_it_too() -> None:
    membership = Membership.first(3)
    inside, outside = Member(0, membership, 4, met=1), Member(2, membership, 4, met=1).with_meeting_ended()
    coordinator, _ = Coordinator.first(membership).died(1)
    coordinator, _ = coordinator.hear(inside.stopped().report())
    _, form = coordinator.hear(outside.stopped().report())
    assert form is not None
    assert [member.stopped().formed(form)[0].met for member in (inside, outside)] == [2, 2]


def test_a_run_ends_where_too_few_are_left() -> None:
    coordinator, _ = Coordinator.first(Membership.first(3), at_least=2).died(1)
    with pytest.raises(RunFailed, match="1 workers are left"):
        coordinator.died(0)


def test_a_joiner_enters_beside_the_one_who_gave_it_a_state() -> None:
    membership = Membership.first(2)
    coordinator = Coordinator.first(membership).joined(2)
    assert coordinator.giver == 0
    giver = Member(0, membership, 5).with_state_given((2,))
    joiner = giver.state_taken(2, before=None)
    coordinator, form = coordinator.hear(giver.stopped().report())
    coordinator, form = coordinator.hear(Member(1, membership, 5).stopped().report())
    assert (form, coordinator.awaited) == (None, (2,))
    coordinator, form = coordinator.hear(joiner.report())
    assert form == Form(Membership(2, (0, 1, 2)), step=5)
    assert joiner.formed(form) == (Member(2, form.membership, 5), False)
    assert (coordinator.joining, coordinator.giver) == ((), None)


def test_a_joiner_that_dies_holds_nobody_up() -> None:
    membership = Membership.first(2)
    coordinator = Coordinator.first(membership, at_least=2).joined(2)
    coordinator, _ = coordinator.hear(Member(0, membership).with_state_given((2,)).stopped().report())
    coordinator, form = coordinator.hear(Member(1, membership).stopped().report())
    assert form is None
    coordinator, form = coordinator.ended(2)
    assert form == Form(Membership(2, (0, 1)), step=0)


def test_a_state_of_an_epoch_before_is_refused() -> None:
    old, new = Member(0, Membership.first(2)), Member(1, Membership(2, (1,)), 1)
    taken = new.state_taken(2, before=None)
    with pytest.raises(StaleEpoch, match="rank 2 has a state of epoch 2 already"):
        old.state_taken(2, before=taken)
    coordinator, _ = Coordinator.first(new.membership).joined(2).ended(7)
    with pytest.raises(StaleEpoch, match="refused rank 2's report of epoch 1; this is epoch 2"):
        coordinator.hear(old.state_taken(2, before=None).report())


def test_who_enters_without_a_step_of_all_is_met_in_the_next_epoch() -> None:
    membership = Membership(4, (0, 1))
    coordinator = Coordinator.first(membership).joined(2)
    stopped = Member(0, membership).stopped().report()
    coordinator, form = coordinator.hear(stopped)
    assert form is None
    joiner = Member(2, membership).stopped().report()
    coordinator = coordinator.entered(joiner)
    assert (coordinator.living, coordinator.joining) == ((0, 1, 2), ())
    coordinator, form = coordinator.hear(Member(1, membership).stopped().report())
    assert form is None
    assert coordinator.awaited == (2,)
    coordinator, form = coordinator.hear(joiner)
    assert form is not None
    assert form.membership == Membership(5, (0, 1, 2))
    with pytest.raises(StaleEpoch, match="refused rank 3's report of epoch 4"):
        coordinator.joined(3).entered(Member(3, membership).stopped().report())
