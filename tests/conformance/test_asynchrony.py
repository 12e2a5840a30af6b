"""How far workers run apart when one of them is slow.

The slow worker takes each step only once the others have made as many steps as the strategy promises them. A strategy
that holds them back for longer leaves it waiting in vain, however fast the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance.rows import SELDOM, Row, prepared, step, steps_of, wait_until

SLOW_S = 0.1
EPOCH_STEPS = 8
NUM_WORKERS = 3

Goal = Callable[[int, int], int]
"""What another worker must have made before the slow one takes a step: from the slow one's steps and from its own."""


def train(worker: Worker, out: Path, *, slow_s: float) -> None:
    """The last worker is slow."""
    model, optimizer, loader = prepared(worker)
    for _ in range(100):
        for x, y, _ in loader:
            if worker.rank == worker.size - 1:
                time.sleep(slow_s)
            step(worker, model, optimizer, x, y)


def train_apart(
    worker: Worker, out: Path, *, goal: Goal, fast_epochs: int = 1, slow_epochs: int = 1, slow_s: float = 0.0
) -> None:
    """The last worker waits before each step until the others have made the steps of `goal`, or all of theirs.

    Where it is to keep them waiting for `slow_s`, it does so once they are at the step after that.
    """
    model, optimizer, loader = prepared(worker)
    is_slow = worker.rank == worker.size - 1
    tallies = [[out / f"{what}-{rank}" for rank in range(worker.size - 1)] for what in ("ended", "begun")]
    own_steps, most = 0, fast_epochs * EPOCH_STEPS
    for _ in range(slow_epochs if is_slow else fast_epochs):
        for x, y, _ in loader:
            if is_slow:
                wait_for(tallies[0], partial(goal, own_steps), most=most)
            if is_slow and slow_s:
                wait_for(tallies[1], partial(goal, own_steps), more=1, most=most)
                time.sleep(slow_s)
            tell(out / f"begun-{worker.rank}")
            step(worker, model, optimizer, x, y)
            own_steps += 1
            tell(out / f"ended-{worker.rank}")


def wait_for(others: list[Path], goal: Callable[[int], int], *, more: int = 0, most: int) -> None:
    goals = [min(goal(num_steps(other)) + more, most) for other in others]
    wait_until(lambda: all(num_steps(other) >= due for other, due in zip(others, goals, strict=True)))


def tell(tally: Path) -> None:
    with tally.open("a") as file:
        file.write("+")


def num_steps(tally: Path) -> int:
    return tally.stat().st_size if tally.exists() else 0


def up_to(staleness: int, slow_steps: int, steps: int) -> int:
    """All that the bound allows the others."""
    return slow_steps + staleness


def more(count: int, slow_steps: int, steps: int) -> int:
    return steps + count


def largest_lead(result: Result, server: int, num_workers: int) -> int:
    """How many clocks the fastest worker was ahead of the slowest when it pushed, at most, at one server."""
    done = dict.fromkeys(range(num_workers), 0)
    lead = 0
    for update in result.updates:
        if update.server == server:
            assert update.clock == done[update.worker]
            lead = max(lead, update.clock - min(done.values()))
            done[update.worker] += 1
    return lead


def usual_waits_s(result: Result) -> list[float]:
    """Each worker's median, which no single delay of a busy machine moves."""
    return [median(record.waiting_s for record in steps_of(result, worker)) for worker in range(NUM_WORKERS)]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_nobody_runs_further_ahead_than_staleness(staleness: int, servers: int, tmp_path: Path) -> None:
    row = Row("ps-ssp", "ps-ssp", NUM_WORKERS, {"staleness": staleness, "servers": servers})
    script = partial(train_apart, goal=partial(up_to, staleness), slow_s=SLOW_S)
    result = row.run(script, tmp_path, checkpoint_every=SELDOM)
    for server in range(servers):
        assert largest_lead(result, server, NUM_WORKERS) == staleness  # and fast workers do use what they are allowed
    assert [len(steps_of(result, worker)) for worker in range(NUM_WORKERS)] == [EPOCH_STEPS] * NUM_WORKERS
    *fast_s, slow_s = usual_waits_s(result)
    assert min(fast_s) > max(slow_s, 0.1 * SLOW_S)
    # Between two steps of a worker, each of the two others has at most the clocks that the bound allows.
    assert max(record.staleness for record in result.steps) <= 2 * (2 * staleness + 1)


@pytest.mark.parametrize(("staleness", "servers"), [(1, 1), (3, 2)])
def test_pauses_do_not_widen_the_lead(staleness: int, servers: int, tmp_path: Path) -> None:
    """A pause lets workers meet whom the rule would keep; they must be kept again after it."""
    row = Row("ps-ssp", "ps-ssp", NUM_WORKERS, {"staleness": staleness, "servers": servers})
    result = row.run(partial(train, slow_s=0.01), tmp_path, max_steps=60, checkpoint_every=2)
    assert all(largest_lead(result, server, NUM_WORKERS) <= staleness for server in range(servers))
    # A pause is due after two gradients, and each of the two others may push one more before it learns of that.
    assert len([event for event in result.events if event.name == "checkpoint"]) >= 60 // 4


@pytest.mark.parametrize("checkpoint_every", [None, 1])
def test_gradients_see_all_updates_that_the_bound_promises(checkpoint_every: int | None, tmp_path: Path) -> None:
    """With staleness 0, a worker at a clock has seen all earlier clocks: what it misses are the others' at its own."""
    row = Row("ps-ssp", "ps-ssp", NUM_WORKERS, {"staleness": 0})
    result = row.run(partial(train, slow_s=0.01), tmp_path, max_steps=60, checkpoint_every=checkpoint_every)
    assert max(record.staleness for record in result.steps) == 2


def test_nobody_waits_without_a_bound(tmp_path: Path) -> None:
    """The fast ones make an epoch for each step of the slow one; any wait for it would be a wait for ever."""
    script = partial(train_apart, goal=partial(more, EPOCH_STEPS), fast_epochs=EPOCH_STEPS)
    result = Row("ps-asp", "ps-asp", NUM_WORKERS).run(script, tmp_path, checkpoint_every=SELDOM)
    steps = [len(steps_of(result, worker)) for worker in range(NUM_WORKERS)]
    assert steps == [EPOCH_STEPS**2, EPOCH_STEPS**2, EPOCH_STEPS]
    assert largest_lead(result, 0, NUM_WORKERS) >= EPOCH_STEPS - 1
    assert max(record.waiting_s for record in result.steps) < 1e-6  # time at the server is no time spent waiting
    slow = [record.staleness for record in steps_of(result, 2)]
    assert slow[0] >= 2 * EPOCH_STEPS
    assert sorted(update.iteration for update in result.updates) == list(range(1, len(result.updates) + 1))
    assert [u.staleness for u in result.updates if u.worker == 2] == slow


def test_backup_workers_leave_the_slow_one_behind(tmp_path: Path) -> None:
    """Two steps of the others close the clock that the slow one computes for: its gradient always comes too late.

    It has as many steps to make, for the first worker through its data ends the run.
    """
    row = Row("ps-bsp", "ps-bsp", NUM_WORKERS, {"backup_workers": 1})
    script = partial(train_apart, goal=partial(more, 2), fast_epochs=3, slow_epochs=3)
    result = row.run(script, tmp_path, checkpoint_every=SELDOM)
    assert [len(steps_of(result, worker)) for worker in range(2)] == [3 * EPOCH_STEPS] * 2
    assert result.iteration == 3 * EPOCH_STEPS
    assert {record.staleness for record in steps_of(result, 2)} == {-1}


def test_bulk_synchronous_workers_keep_in_step(tmp_path: Path) -> None:
    script = partial(train_apart, goal=partial(up_to, 0), slow_s=SLOW_S)
    result = Row("ps-bsp", "ps-bsp", NUM_WORKERS).run(script, tmp_path)
    assert largest_lead(result, 0, NUM_WORKERS) == 0
    assert [len(steps_of(result, worker)) for worker in range(NUM_WORKERS)] == [EPOCH_STEPS] * NUM_WORKERS
    *fast_s, slow_s = usual_waits_s(result)
    assert min(fast_s) > max(slow_s, 0.1 * SLOW_S)
