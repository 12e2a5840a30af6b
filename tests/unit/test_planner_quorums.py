"""What plans say of rounds at servers that a quorum ends: by hand, and beside runs on the virtual engine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.lab.variant import Variant
from paceline.planner import StepWork, plan, predict
from paceline.planner.noise import NoiseScale
from paceline.planner.search import Point
from paceline.planner.simulator import simulate
from paceline.strategies.traits import Served
from tests.conformance import virtual_cluster
from tests.conformance.rows import SELDOM
from tests.unit.test_planner_predict import STEP_S, WORK, cluster_of, train
from tests.unit.test_planner_traits import Declared

EVERY = 4
TINY = StepWork(tensor_bytes=(4,), samples=32)
LOG_NORMAL = {"distribution": "log-normal", "variation": 0.3}
# Losses here have no data in them.
pytestmark = pytest.mark.filterwarnings("ignore:all . ranks compute the same gradients")


def rounds(quorum: int, **options: Any) -> dict[str, Any]:
    return {"quorum": quorum, "every": EVERY, **options}


def test_a_quorum_of_all_waits_for_all_and_one_of_one_for_nobody() -> None:
    """Of a model that travels in one piece: as servers that make an update of every worker's push, or of each."""
    small = replace(WORK, tensor_bytes=(400_000,))
    for quorum, served in ((6, Served(every=EVERY)), (1, Served(every=EVERY, staleness=math.inf))):
        found = predict(
            cluster_of(**LOG_NORMAL), strategy="async-diloco", workers=6, work=small, options=rounds(quorum)
        )
        alike = predict(
            cluster_of(**LOG_NORMAL),
            strategy=Declared(traffic=(served,), unit="round", num_servers=1),
            workers=6,
            work=small,
        )
        assert replace(found, strategy=alike.strategy) == alike
        assert found.updates_a_step == 6 / quorum


@pytest.mark.parametrize(("workers", "quorum", "together"), [(8, 4, 8), (8, 3, 6), (8, 5, 5), (7, 2, 6)])
def test_workers_that_compute_alike_by_hand(workers: int, quorum: int, together: int) -> None:
    """They come at once: as many whole rounds end as they fill, and who is left over waits for the next time."""
    found = predict(cluster_of(), strategy="async-diloco", workers=workers, work=TINY, options=rounds(quorum))
    # Means may begin between two rounds that end at once, one of some hundreds.
    assert found.step_s == pytest.approx(workers / together * STEP_S, rel=5e-3)
    assert found.iteration_s == pytest.approx(quorum / together * EVERY * STEP_S, rel=5e-3)
    assert found.updates_a_step == pytest.approx(workers / quorum)
    assert found.global_batch == pytest.approx(quorum * TINY.samples)
    assert found.late_steps == pytest.approx(EVERY * (workers / quorum - 1))


def test_memoryless_workers_by_hand() -> None:
    """With k of n waiting, the next one comes after the n - k-th part of a step: a harmonic sum a round."""
    cluster = cluster_of(distribution="exponential")
    found = predict(cluster, strategy="async-diloco", workers=8, work=TINY, options={"quorum": 5, "every": 1})
    assert found.iteration_s == pytest.approx(STEP_S * sum(1 / (8 - k) for k in range(5)), rel=0.05)


def test_a_round_stays_open_for_its_grace() -> None:
    """A host that needs half as long again is waited for where the grace is longer than that, and only there."""
    cluster = cluster_of(3)
    cluster = replace(cluster, hosts=(*cluster.hosts, replace(cluster.hosts[0], name="slow", count=1, speed=1 / 1.5)))
    cluster = replace(cluster, hosts=(*cluster.hosts, replace(cluster.hosts[0], name="server", count=1, workers=0)))
    late_s = 0.5 * EVERY * STEP_S
    long, short = (
        predict(cluster, strategy="async-diloco", workers=4, work=TINY, options=rounds(3, grace_s=grace_s))
        for grace_s in (1.1 * late_s, 0.1 * late_s)
    )
    assert long.iteration_s == pytest.approx(1.5 * EVERY * STEP_S, rel=1e-3)
    assert long.updates_a_step == pytest.approx(1.0)
    assert short.iteration_s < 1.2 * EVERY * STEP_S
    assert short.updates_a_step > 1.1


@pytest.mark.parametrize("quorum", [1, 2, 3, 6])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_rounds_end_as_in_the_simulator(quorum: int, codec: str | None) -> None:
    options = rounds(quorum) | ({} if codec is None else {"codec": codec})
    given: dict[str, Any] = {"strategy": "async-diloco", "workers": 6, "work": WORK, "options": options}
    found = predict(cluster_of(**LOG_NORMAL), **given)
    simulated = simulate(cluster_of(**LOG_NORMAL), steps=200, **given)
    assert found.step_s == pytest.approx(simulated.step_s, rel=0.05)
    assert found.step_s_low <= found.step_s <= found.step_s_high


def test_bytes_on_cards() -> None:
    """A model each way in four steps, whatever the quorum."""
    for quorum in (1, 2, 4):
        found = predict(cluster_of(), strategy="async-diloco", workers=4, work=WORK, options=rounds(quorum))
        assert found.link_bytes == pytest.approx({"worker's card": 1e6, "server's card": 4e6})


@pytest.mark.parametrize(
    ("workers", "options", "compute"),
    [
        (4, {"quorum": 2}, LOG_NORMAL),
        pytest.param(4, {"quorum": 1}, LOG_NORMAL, marks=pytest.mark.slow),
        pytest.param(4, {"quorum": 3}, {}, marks=pytest.mark.slow),
        pytest.param(4, {"quorum": 3}, LOG_NORMAL, marks=pytest.mark.slow),
        pytest.param(4, {"quorum": 4}, {}, marks=pytest.mark.slow),
        pytest.param(4, {"quorum": 2, "servers": 2}, LOG_NORMAL, marks=pytest.mark.slow),
        pytest.param(6, {"quorum": 3, "grace_s": 0.1}, LOG_NORMAL, marks=pytest.mark.slow),
    ],
)
def test_the_virtual_engine_takes_as_long(
    workers: int, options: dict[str, Any], compute: dict[str, Any], tmp_path: Path
) -> None:
    """Real changes of 4 MB, which several shards hold; from the second round to the last, in which all meet."""
    cluster, options = cluster_of(**compute), {"every": EVERY, **options}
    max_steps = 12 * workers // options["quorum"]
    result = virtual_cluster.run(
        train,
        tmp_path,
        "async-diloco",
        workers,
        cluster=cluster,
        options=options,
        max_steps=max_steps,
        checkpoint_every=SELDOM,
    )
    ends_s: dict[int, list[float]] = {}
    for step in result.steps:
        ends_s.setdefault(step.worker, []).append(step.time_s)
    taken_s = [np.diff(each[2 * EVERY - 1 : -EVERY]).mean() for each in ends_s.values()]
    work = replace(WORK, samples=1)
    found = predict(cluster, strategy="async-diloco", workers=workers, work=work, options=options)
    assert found.step_s == pytest.approx(float(np.mean(taken_s)), rel=0.07)  # few rounds: chance is 3 % of it


def planned(text: str, noise: NoiseScale | None) -> Point:
    found = plan(cluster_of(9), WORK, strategies=["single", text], max_workers=8, noise=noise, num_checks=0)
    return next(p for p in found.points if p.asked == Variant.parse(text).text and p.prediction.workers == 8)


def test_a_plan_ranks_them_by_the_noise_scale() -> None:
    """A round of all drifts as diloco does. Of smaller rounds each joins fewer changes, which are later."""
    noise = NoiseScale(20.0 * WORK.samples)
    synchronous = planned(f"diloco:every={EVERY}", noise)
    points = {quorum: planned(f"async-diloco:every={EVERY}:quorum={quorum}", noise) for quorum in (8, 4, 1)}
    assert all(point.is_ranked for point in points.values())
    assert points[8].drift == pytest.approx(synchronous.drift)
    assert points[8].drift > points[4].drift > points[1].drift == pytest.approx(1.0)
    for quorum, point in points.items():
        late = noise.steps(quorum * WORK.samples, staleness=EVERY * (8 / quorum - 1)) / noise.steps(WORK.samples)
        step_s = point.prediction.step_s * quorum / 8
        assert point.target_speedup == pytest.approx(STEP_S / (late * point.drift * step_s), rel=0.01)
    assert not planned(f"async-diloco:every={EVERY}", None).is_ranked


def test_a_plan_looks_at_servers_and_rounds_of_several_lengths() -> None:
    found = plan(cluster_of(8), WORK, max_workers=4, noise=NoiseScale(640.0), num_checks=0)
    labels = {point.label for point in found.points if point.asked == "async-diloco"}
    assert {"async-diloco", "async-diloco:servers=2", "async-diloco:every=5"} <= labels
    assert "async-diloco" not in found.unpriced
    assert any(point.asked == "async-diloco" for point in found.ranked)
