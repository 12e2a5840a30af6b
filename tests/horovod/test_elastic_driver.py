"""Who takes part in an elastic job: hosts and workers that come, go and fail, without any process."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.horovod.elastic_jobs.driver import (
    ADDED,
    REMOVED,
    Command,
    Driver,
    Enter,
    Finish,
    Policy,
    Start,
    Stop,
    Tell,
)
from paceline.horovod.elastic_jobs.known_hosts import Cooldown, KnownHosts

KILLED = -9


class Job:
    """A driver with its clock; what it has said last of each worker."""

    def __init__(self, slots: dict[str, int], *, cooldown: Cooldown | None = None, **policy: object) -> None:
        settings = {"num_proc": 2, "min_num_proc": 1, **policy}
        self.driver = Driver(Policy(**settings), KnownHosts(cooldown, lambda: 0.0), now_s=0.0)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.host_of: dict[int, str] = {}
        self.commands = self._kept(self.driver.found(slots, 0.0))

    def _kept(self, commands: list[Command]) -> list[Command]:
        self.host_of |= {each.worker: each.host for each in commands if isinstance(each, Start)}
        self.commands = commands
        return commands

    def found(self, **slots: int) -> list[Command]:
        return self._kept(self.driver.found(slots, self.now_s))

    def asked(self, *workers: int) -> list[Command]:
        """What comes of the last of them."""
        for worker in workers:
            self._kept(self.driver.asked(worker, self.now_s))
        return self.commands

    def ended(self, worker: int, status: int) -> list[Command]:
        return self._kept(self.driver.ended(worker, status, self.now_s))

    def later(self, more_s: float) -> list[Command]:
        self.now_s += more_s
        return self._kept(self.driver.ticked(self.now_s))


def started(slots: dict[str, int], **policy: object) -> Job:
    """A job whose first workers train."""
    job = Job(slots, **policy)  # type: ignore[arg-type]
    job.asked(*job.host_of)
    assert isinstance(job.commands[-1], Enter)
    return job


def entered(commands: list[Command]) -> Enter:
    (entering,) = [each for each in commands if isinstance(each, Enter)]
    return entering


def test_the_first_membership_has_all_slots_up_to_the_most() -> None:
    job = Job({"a": 2, "b": 2}, max_num_proc=3)
    assert job.commands == [Start(1, "a"), Start(2, "a"), Start(3, "b")]
    assert job.asked(3, 1) == []
    entering = entered(job.asked(2))
    assert (entering.membership.epoch, entering.workers, entering.hosts) == (1, (1, 2, 3), ("a", "a", "b"))
    assert (entering.joined, entering.has_newcomers, entering.waited_s) == ((1, 2, 3), True, 0.0)


def test_nobody_starts_before_there_is_room_for_the_first_number() -> None:
    job = Job({"a": 1}, elastic_timeout_s=10.0)
    assert job.commands == []
    assert job.driver.next_s == 10.0
    assert job.later(9.0) == []
    assert job.found(a=1, b=1) == [Start(1, "a"), Start(2, "b")]
    assert job.later(9.0) == []  # room was found in time


def test_too_few_slots_until_the_timeout_end_the_job() -> None:
    job = Job({"a": 1}, elastic_timeout_s=10.0)
    (finish,) = job.later(10.0)
    assert isinstance(finish, Finish)
    assert finish.error is not None
    assert "for 10 s there was room for 1 of at least 2 workers" in finish.error
    assert job.later(1.0) == []


def test_a_new_host_is_heard_of_once_its_workers_are_there() -> None:
    job = started({"a": 2})
    assert job.found(a=2, b=1) == [Start(3, "b")]
    assert job.asked(3) == [Tell((1, 2), ADDED)]
    assert job.found(a=2, b=1) == []  # members hear of it once
    job.later(5.0)  # in which the newcomer alone waits
    assert job.asked(1) == []
    job.later(2.0)
    entering = entered(job.asked(2))
    assert (entering.membership.epoch, entering.workers, entering.hosts) == (2, (1, 2, 3), ("a", "a", "b"))
    assert (entering.joined, entering.has_newcomers, entering.waited_s) == ((3,), True, 2.0)


def test_members_that_are_told_early_wait_for_new_workers() -> None:
    job = started({"a": 2}, tells_early=True)
    assert job.found(a=2, b=1) == [Start(3, "b"), Tell((1, 2), ADDED)]
    assert job.asked(1, 2) == []
    assert entered(job.asked(3)).workers == (1, 2, 3)


def test_a_host_that_is_gone_loses_its_workers_at_the_next_membership() -> None:
    job = started({"a": 1, "b": 2})
    assert job.found(b=2) == [Tell((1, 2, 3), REMOVED)]
    job.asked(1, 2)
    stop, entering = job.asked(3)
    assert stop == Stop(1)
    assert isinstance(entering, Enter)
    assert (entering.workers, entering.hosts, entering.has_newcomers) == ((2, 3), ("b", "b"), False)


def test_slots_that_are_gone_are_those_of_the_youngest() -> None:
    job = started({"a": 3}, num_proc=3)
    assert job.found(a=1) == [Tell((1, 2, 3), REMOVED)]
    job.asked(3, 2)
    assert [*job.asked(1)][:2] == [Stop(2), Stop(3)]


def test_where_all_hosts_are_others_one_of_before_stays_until_they_have_the_state() -> None:
    job = started({"a": 2})
    assert job.found(b=2) == [Start(3, "b"), Start(4, "b")]
    assert job.asked(3) == [Tell((1, 2), ADDED)]
    job.asked(4, 1)
    stop, entering, tell = [*job.asked(2), *job.later(0.0)]
    assert stop == Stop(2)
    assert isinstance(entering, Enter)
    assert (entering.workers, entering.hosts) == ((1, 3, 4), ("a", "b", "b"))
    assert tell == Tell((1, 3, 4), REMOVED)
    job.asked(1, 3)
    stop, entering = job.asked(4)
    assert stop == Stop(1)
    assert isinstance(entering, Enter)
    assert (entering.workers, entering.has_newcomers) == ((3, 4), False)


def test_who_is_waited_for_enters_though_hosts_have_changed_meanwhile() -> None:
    job = started({"a": 1, "b": 1}, tells_early=True)
    job.found(a=1, b=1, c=1)
    assert job.found(b=1) == []
    job.asked(1, 2)
    assert entered(job.asked(3)).workers == (1, 2, 3)
    assert job.later(0.0) == [Tell((1, 2, 3), REMOVED)]


def test_a_dead_worker_takes_its_host_out_and_the_others_go_on_at_once() -> None:
    job = started({"a": 2, "b": 2}, num_proc=4, min_num_proc=2)
    assert job.ended(1, KILLED) == [Stop(2)]
    assert job.found(a=2, b=2) == []  # for good, without a cooldown
    assert job.asked(3) == []
    entering = entered(job.asked(4))
    assert (entering.membership.epoch, entering.workers) == (2, (3, 4))
    assert job.ended(2, KILLED) == []  # which was to end


def test_a_host_whose_cooldown_is_over_comes_back_behind_the_others() -> None:
    job = started({"a": 1, "b": 1}, cooldown=Cooldown(10.0, 30.0))
    job.ended(1, 1)
    assert entered(job.asked(2)).workers == (2,)
    assert job.driver.next_s == 20.0  # twice the least, the first time
    assert job.later(19.0) == []
    assert job.later(1.0) == [Start(3, "a")]
    assert job.asked(3) == [Tell((2,), ADDED)]
    entering = entered(job.asked(2))
    assert (entering.workers, entering.hosts) == ((2, 3), ("b", "a"))
    job.ended(3, 1)  # the second time it would be 40 s, which is more than the most
    job.asked(2)
    assert job.later(29.0) == []
    assert job.later(1.0) == [Start(4, "a")]


def test_cooldowns_grow_and_have_ends() -> None:
    cooldown = Cooldown(2.0, 60.0)
    assert [cooldown.after(times, 0.0) for times in (1, 2, 3, 9)] == [4.0, 8.0, 16.0, 60.0]
    assert cooldown.after(1, 1.0) == 6.0
    for least_s, most_s in ((0.5, 2.0), (3.0, 2.0), (1.0, 4000.0)):
        with pytest.raises(UsageError, match="a cooldown range is two numbers of seconds"):
            Cooldown(least_s, most_s)


def test_too_few_survivors_wait_for_room() -> None:
    job = started({"a": 1, "b": 1}, min_num_proc=2, elastic_timeout_s=10.0)
    job.ended(1, 1)
    assert job.asked(2) == []
    assert job.later(5.0) == []
    assert job.found(a=1, b=1, c=1) == [Start(3, "c")]
    assert entered(job.asked(3)).workers == (2, 3)


def test_too_few_survivors_end_the_job_after_the_timeout() -> None:
    job = started({"a": 1, "b": 1}, min_num_proc=2, elastic_timeout_s=10.0)
    job.ended(1, 1)
    job.asked(2)
    (finish,) = job.later(10.0)
    assert isinstance(finish, Finish)
    assert "room for 1 of at least 2 workers" in (finish.error or "")
    assert "first rank 0 on a ended with status 1" in (finish.error or "")


def test_a_worker_that_others_wait_for_too_long_takes_its_host_out() -> None:
    job = started({"a": 1, "b": 1, "c": 1}, come_within_s=10.0)
    assert job.driver.next_s is None  # who trains may take what time it likes
    job.later(100.0)
    job.ended(3, KILLED)
    job.asked(1)
    assert job.driver.next_s == 110.0
    job.later(4.0)
    assert job.found(a=1, b=1, c=1) == []  # which is not what is waited for
    assert job.later(5.0) == []
    stop, entering = job.later(1.0)
    assert stop == Stop(2)
    assert isinstance(entering, Enter)
    assert entering.workers == (1,)
    assert job.driver.next_s is None
    assert job.ended(2, 1) == []


def test_a_first_worker_that_never_comes_is_told() -> None:
    job = Job({"a": 1, "b": 1}, min_num_proc=2, come_within_s=10.0, elastic_timeout_s=20.0)
    assert job.driver.next_s is None  # a script may prepare for as long as it likes
    job.asked(1)
    assert job.later(10.0) == [Stop(2)]
    (finish,) = job.later(20.0)
    assert isinstance(finish, Finish)
    assert "first a new worker on b did not come within 10 s where others wait" in (finish.error or "")


def test_a_newcomer_has_its_whole_time_from_its_start() -> None:
    job = started({"a": 1, "b": 1}, min_num_proc=2, tells_early=True, come_within_s=10.0, elastic_timeout_s=100.0)
    job.ended(2, KILLED)
    job.asked(1)
    job.later(50.0)
    assert job.found(a=1, c=1)[0] == Start(3, "c")
    assert job.driver.next_s == 60.0
    assert job.later(9.0) == []
    assert job.later(1.0) == [Stop(3)]
    assert job.driver.next_s == 160.0


def test_a_newcomer_that_is_waited_for_is_room() -> None:
    job = started({"a": 1, "b": 1}, min_num_proc=2, tells_early=True, elastic_timeout_s=10.0)
    job.ended(2, KILLED)
    job.asked(1)
    job.later(9.0)
    job.found(a=1, c=1)
    assert job.later(5.0) == []
    assert job.driver.next_s is not None
    assert job.driver.next_s > job.now_s  # else the caller would ask again at once
    assert entered(job.asked(3)).workers == (1, 3)


def test_the_last_work_beside_a_success_may_take_its_time() -> None:
    job = started({"a": 1, "b": 1, "c": 1}, come_within_s=10.0)
    job.ended(1, 0)
    job.asked(2)
    assert job.driver.next_s is None
    assert job.later(100.0) == []
    assert job.ended(3, 0) == [Finish(None)]


def test_the_reset_limit_counts_memberships_after_the_first() -> None:
    job = started({"a": 1, "b": 1, "c": 1}, reset_limit=1)
    job.ended(3, 1)
    job.asked(1)
    assert entered(job.asked(2)).membership.epoch == 2
    job.ended(2, 1)
    (finish,) = job.asked(1)
    assert isinstance(finish, Finish)
    assert "more often than the 1 times of --reset-limit; lastly since rank 1 on b ended" in (finish.error or "")


@pytest.mark.parametrize("first", [1, 3])
def test_all_hosts_out_is_the_end(first: int) -> None:
    job = started({"a": 2, "b": 2}, num_proc=4)
    job.ended(first, KILLED)
    finish = job.ended(4 - first, 1)[-1]
    assert isinstance(finish, Finish)
    text = f"exited with non-zero status: first rank {first - 1} on {'a' if first == 1 else 'b'} was ended by signal 9"
    assert text in (finish.error or "")


def test_whoever_has_done_the_work_ends_the_job() -> None:
    job = started({"a": 2})
    assert job.ended(1, 0) == []
    assert job.found(a=2, b=9) == []  # nobody starts any more
    assert job.ended(2, 0) == [Finish(None)]


def test_who_waits_for_a_next_membership_beside_a_success_is_done_too() -> None:
    job = started({"a": 2})
    job.ended(1, 0)
    assert job.asked(2) == [Finish(None)]


def test_a_failure_beside_a_success_is_told() -> None:
    job = started({"a": 1, "b": 1})
    job.ended(1, 0)
    (finish,) = job.ended(2, 1)
    assert isinstance(finish, Finish)
    assert "rank 1 on b ended with status 1" in (finish.error or "")


def test_workers_that_fail_at_the_start_end_the_job() -> None:
    job = Job({"a": 2})
    finish = job.ended(1, 1)[-1]
    assert isinstance(finish, Finish)
    assert "a new worker on a ended with status 1" in (finish.error or "")


def test_numbers_that_contradict_one_another_are_refused() -> None:
    for numbers in ({"num_proc": 1, "min_num_proc": 2}, {"num_proc": 3, "min_num_proc": 2, "max_num_proc": 2}):
        with pytest.raises(UsageError, match="smallest first"):
            Policy(**numbers)


HOSTS = ("a", "b", "c")
STEPS = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 3)),
        st.tuples(st.sampled_from(["asks", "dies", "passes"]), st.integers(0, 20)),
    ),
    max_size=30,
)


@given(STEPS, st.integers(1, 3), st.integers(3, 5))
def test_whatever_happens(steps: list[dict[str, int] | tuple[str, int]], least: int, most: int) -> None:
    """A worker enters only while it waits; a membership has as many as are allowed, host by host, with one of before
    at its head; epochs grow by one; and nobody is spoken to after the end."""
    job = Job(
        {"a": 2, "b": 1},
        num_proc=3,
        min_num_proc=least,
        max_num_proc=most,
        cooldown=Cooldown(1.0, 9.0),
        come_within_s=3.0,
    )
    alive, waiting, members, epoch = set[int](), set[int](), set[int](), 0
    seen, is_over = job.commands, False
    for step in [None, *steps]:
        if isinstance(step, dict):
            seen = job.found(**step)
        elif step is not None:
            kind, chosen = step
            able = sorted(alive - waiting if kind == "asks" else alive)
            if kind == "passes" or not able:
                seen = job.later(float(chosen))
            elif kind == "asks":
                waiting.add(able[chosen % len(able)])
                seen = job.asked(able[chosen % len(able)])
            else:
                alive.discard(able[chosen % len(able)])
                waiting &= alive
                seen = job.ended(able[chosen % len(able)], 1)
        assert not (is_over and seen)
        for command in seen:
            match command:
                case Start(worker):
                    alive.add(worker)
                case Stop(worker):
                    alive.remove(worker)
                    waiting.discard(worker)
                case Tell(workers):
                    assert set(workers) <= (members & alive) - waiting
                case Enter(membership, workers, hosts):
                    assert set(workers) <= waiting
                    is_handed_over = epoch > 0 and len(members & {*workers}) == 1
                    assert least <= len(workers) <= most + is_handed_over
                    assert membership.epoch == epoch + 1
                    assert [job.host_of[worker] for worker in workers] == [*hosts]
                    assert len({*hosts}) == 1 + sum(one != other for one, other in itertools.pairwise(hosts))
                    assert epoch == 0 or workers[0] in members
                    assert not (members & alive) - waiting
                    epoch, members = membership.epoch, {*workers}
                    waiting -= members
                case Finish():
                    is_over = True
