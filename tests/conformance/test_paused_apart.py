"""Workers that train each at its own pace go on from a pause as far apart as they came: it changes nothing of that."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.records import UpdateRecord
from paceline.running.result import Result
from paceline.training.pauses import Pauses
from paceline.training.worker import Worker
from tests.conformance.rows import SELDOM, Row, checksum, keep, kept, launched, prepared, step, steps_of
from tests.conformance.test_judged_beside import ASYNCHRONOUS, tally, train_and_look
from tests.conformance.virtual_cluster import cluster_of, run

WORKERS, STEPS, OFTEN = 3, 90, 10


def simulated(script: Any, out: Path, strategy: str, options: dict[str, Any], **settings: Any) -> Result:
    cluster = cluster_of(gbit_per_s=0.1, latency_us=50.0, **settings.pop("compute", {}))
    settings = {"max_steps": STEPS, **settings}
    return run(script, out, strategy, WORKERS, cluster=cluster, options=options, **settings)


def by_server(result: Result) -> dict[int, list[UpdateRecord]]:
    """Which of several is told first is a matter of rounding."""
    servers = {update.server for update in result.updates}
    return {server: [update for update in result.updates if update.server == server] for server in servers}


def num_checkpoints(result: Result) -> int:
    return sum(event.name == "checkpoint" for event in result.events)


@ASYNCHRONOUS
def test_no_checkpoint_changes_any_update(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, where steps take equally long: nobody then takes two in the time of another one's."""
    plain = simulated(train_and_look, tmp_path / "plain", strategy, options, checkpoint_every=SELDOM)
    saved = simulated(train_and_look, tmp_path / "saved", strategy, options, checkpoint_every=OFTEN)
    assert max(update.staleness for update in plain.updates) == WORKERS - 1
    assert num_checkpoints(saved) == STEPS // OFTEN
    assert by_server(saved) == by_server(plain)
    assert [record.time_s for record in saved.steps] == pytest.approx([record.time_s for record in plain.steps])
    assert checksum(saved.model_state()) == checksum(plain.model_state())


def test_looking_for_a_target_changes_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = simulated(tally, tmp_path / "plain", "ps-asp", {"servers": 1}, checkpoint_every=SELDOM)
    met, meet = [], Pauses.meet

    def counting(self: Pauses, **about: Any) -> bool:
        met.append(about)
        return meet(self, **about)

    monkeypatch.setattr(Pauses, "meet", counting)
    settings = {"target": "updates>=80", "eval_every": 5, "checkpoint_every": SELDOM, "max_steps": 10_000}
    judged = simulated(tally, tmp_path / "judged", "ps-asp", {"servers": 1}, **settings)
    assert len(met) >= 4 * WORKERS, "only at both ends, so that nothing is shown"
    assert judged.updates[:STEPS] == plain.updates
    first = next(evaluation for evaluation in judged.evaluations if evaluation.iteration >= 80)
    assert judged.time_to_target_s == first.time_s


def meet_now_and_then(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    steps = 0
    while True:
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)
            steps += 1
            if steps % 5 == 0:
                with worker.meeting("here"):
                    pass


def test_pauses_between_meetings_do_not_set_workers_further_apart(tmp_path: Path) -> None:
    """One of two computes twice as long, so that the other waits for it at each meeting."""
    cluster = cluster_of(slow=0.5)
    plain, saved = (
        run(
            meet_now_and_then, tmp_path / str(every), "ps-asp", 2, cluster=cluster, max_steps=60, checkpoint_every=every
        )
        for every in (SELDOM, 7)
    )
    assert num_checkpoints(saved) == 9
    before, after = (max(update.staleness for update in result.updates) for result in (plain, saved))
    assert after <= before == 3


def test_pauses_leave_staleness_distributed_as_it_was(tmp_path: Path) -> None:
    """Where one worker takes several steps in another's, some gradients of a pause come in another order."""
    compute = {"distribution": "log-normal", "variation": 0.3}
    plain, saved = (
        simulated(
            tally, tmp_path / str(every), "ps-asp", {}, max_steps=200, checkpoint_every=every, compute=dict(compute)
        )
        for every in (SELDOM, 20)
    )
    assert num_checkpoints(saved) == 10
    before, after = ([update.staleness for update in result.updates] for result in (plain, saved))
    assert statistics.mean(after) == pytest.approx(statistics.mean(before), abs=0.01)
    shares = [[some.count(staleness) / len(some) for staleness in range(10)] for some in (before, after)]
    assert sum(abs(one - other) for one, other in zip(*shares, strict=True)) / 2 < 0.05


LONG_S = 0.5


def uneven(worker: Worker, out: Path) -> None:
    """The second worker comes to pauses much later than the first. Each tells what a watch shows after its steps."""
    model, optimizer, loader = prepared(worker)
    watch = []
    for _ in range(6):
        for x, y, _ in loader:
            time.sleep(LONG_S * worker.rank)
            step(worker, model, optimizer, x, y)
            watch.append(time.perf_counter())
            if worker.iteration >= 25:
                keep(out, f"watch-{worker.rank}", watch)
                return
            time.sleep(0.02)


def require_equal_clocks(result: Result, out: Path) -> None:
    """Between two pauses, which stand on nobody's clock. If all had begun their next step together, the second
    worker's clock would be ahead by what it had come later, after each pause: twice what is left to busy machines."""
    assert num_checkpoints(result) >= 4
    ahead_s: list[float] = []
    for rank in range(2):
        ended_s = [record.time_s for record in steps_of(result, rank)]
        watch = kept(out, f"watch-{rank}")
        ahead_s.append(watch[-1] - ended_s[-1])
    assert ahead_s[0] == pytest.approx(ahead_s[1], abs=num_checkpoints(result) * LONG_S / 2)


@pytest.mark.slow
def test_training_clocks_of_real_workers_agree_after_pauses(tmp_path: Path) -> None:
    result = Row("ps-asp", "ps-asp", 2).run(uneven, tmp_path, checkpoint_every=5)
    require_equal_clocks(result, tmp_path)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_here")
def test_training_clocks_of_workers_on_ray_agree_after_pauses(tmp_path: Path) -> None:
    script = partial(launched, uneven, tmp_path)
    result = paceline.run(script, strategy="ps-asp", workers=2, out=tmp_path / "run", checkpoint_every=5)
    require_equal_clocks(result, tmp_path)
