"""How far workers run apart, in real time and with one slow worker."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from paceline.result import Result
from paceline.worker import Worker
from tests.conformance.rows import Row, prepared, step

SLOW_S = 0.03


def train(worker: Worker, out: Path, *, slow_s: float = SLOW_S) -> None:
    """The last worker is slow."""
    model, optimizer, loader = prepared(worker)
    for _ in range(100):
        for x, y, _ in loader:
            if worker.rank == worker.size - 1:
                time.sleep(slow_s)
            step(worker, model, optimizer, x, y)


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


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_nobody_runs_further_ahead_than_staleness(staleness: int, servers: int, tmp_path: Path) -> None:
    row = Row("ps-ssp", "ps-ssp", 3, {"staleness": staleness, "servers": servers})
    result = row.run(train, tmp_path, max_steps=45, checkpoint_every=20)
    for server in range(servers):
        assert largest_lead(result, server, 3) == staleness  # and fast workers do use what they are allowed
    steps = {worker: [s for s in result.steps if s.worker == worker] for worker in range(3)}
    assert max(len(steps[0]), len(steps[1])) - len(steps[2]) <= staleness + 1
    waited_s = [sum(record.waiting_s for record in steps[worker]) for worker in range(3)]
    assert min(waited_s[:2]) > 0.4 * SLOW_S * len(steps[2])
    assert waited_s[2] < 0.25 * SLOW_S * len(steps[2])
    # Between two steps of a worker, each of the two others has at most the clocks that the bound allows.
    assert max(record.staleness for record in result.steps) <= 2 * (2 * staleness + 1)


def test_pauses_do_not_widen_the_lead(tmp_path: Path) -> None:
    """A pause lets workers meet whom the rule would keep; they must be kept again after it."""
    row = Row("ps-ssp", "ps-ssp", 3, {"staleness": 1})
    result = row.run(partial(train, slow_s=0.01), tmp_path, max_steps=60, checkpoint_every=2)
    assert largest_lead(result, 0, 3) <= 1
    assert len([event for event in result.events if event.name == "checkpoint"]) > 15


@pytest.mark.parametrize("checkpoint_every", [None, 1])
def test_gradients_see_all_updates_that_the_bound_promises(checkpoint_every: int | None, tmp_path: Path) -> None:
    """With staleness 0, a worker at a clock has seen all earlier clocks: what it misses are the others' at its own."""
    row = Row("ps-ssp", "ps-ssp", 3, {"staleness": 0})
    result = row.run(partial(train, slow_s=0.01), tmp_path, max_steps=60, checkpoint_every=checkpoint_every)
    assert max(record.staleness for record in result.steps) == 2


def test_nobody_waits_without_a_bound(tmp_path: Path) -> None:
    result = Row("ps-asp", "ps-asp", 3).run(train, tmp_path, max_time_s=1.0)
    steps = [len([record for record in result.steps if record.worker == worker]) for worker in range(3)]
    assert min(steps[:2]) > 2 * steps[2] > 0
    assert largest_lead(result, 0, 3) > 10
    fast = [record for record in result.steps if record.worker < 2]
    assert sum(record.waiting_s for record in fast) < 0.1 * result.training_time_s
    slow = [record.staleness for record in result.steps if record.worker == 2]
    assert max(slow) > 10
    assert sorted(update.iteration for update in result.updates) == list(range(1, len(result.updates) + 1))
    assert [u.staleness for u in result.updates if u.worker == 2] == slow


def test_backup_workers_leave_the_slow_one_behind(tmp_path: Path) -> None:
    row = Row("ps-bsp", "ps-bsp", 3, {"backup_workers": 1})
    result = row.run(train, tmp_path, max_steps=60)
    steps = [len([record for record in result.steps if record.worker == worker]) for worker in range(3)]
    assert min(steps[:2]) >= 55 > 3 * steps[2]
    dropped = [record.staleness for record in result.steps if record.worker == 2]
    assert dropped.count(-1) > len(dropped) / 2


def test_bulk_synchronous_workers_keep_in_step(tmp_path: Path) -> None:
    result = Row("ps-bsp", "ps-bsp", 3).run(train, tmp_path, max_steps=15)
    assert largest_lead(result, 0, 3) == 0
    fast = [record for record in result.steps if record.worker == 0]
    assert len(fast) == 15
    assert sum(record.waiting_s for record in fast) > 0.7 * 15 * SLOW_S
