"""Summary, speed-up and Amdahl's fit against answers worked out by hand, published ones, and laws that must hold."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.lab import amdahl, analysis
from paceline.lab.frames import table
from tests.lab.made import reaching, study

SECONDS = st.floats(0.01, 1e5)


def trials(times_s: dict[tuple[str, int, int], float | None]) -> pd.DataFrame:
    """The table of trials with these times to the target by strategy, workers and seed; none: never reached."""
    rows = []
    for (strategy, workers, seed), time_s in times_s.items():
        to_target = math.nan if time_s is None else time_s
        row = dict.fromkeys(table("trials", []).columns, math.nan)
        row |= {
            "study": "s", "script": "train.py", "strategy": strategy, "workers": workers, "seed": seed,
            "trial": f"{strategy}-n{workers}-s{seed}", "status": "finished", "reason": "", "engine": "ray",
            "cluster": "",
            "unit": "update", "servers": 0, "iterations": 10, "samples": 1000, "target": "accuracy=0.5",
            "metric": "accuracy", "reached": time_s is not None, "time_to_target_s": to_target,
            "worker_s_to_target": workers * to_target, "cost_s_to_target": workers * to_target, "hold": 1,
            "moved_bytes": 0, "max_staleness": 0, "samples_per_s": 100.0,
            "resolution_s": 0.0, "last_metric": 0.5, "iterations_to_target": 10.0 if time_s is not None else math.nan,
        }  # fmt: skip
        rows.append(row)
    return table("trials", rows)


def summary(times_s: dict[tuple[str, int, int], float | None]) -> pd.DataFrame:
    return analysis.summarise(trials(times_s)).set_index(["strategy", "workers"])


def test_speedup_and_efficiency_by_hand() -> None:
    # Seed 0: 40 s / 10 s = 4 and seed 1: 60 s / 20 s = 3, so 3.5 on average; over 5 workers 0.7.
    rows = summary({("a", 1, 0): 40.0, ("a", 1, 1): 60.0, ("a", 5, 0): 10.0, ("a", 5, 1): 20.0})
    five = rows.loc["a", 5]
    assert [five[f"speedup{bound}"] for bound in ("", "_low", "_high")] == [3.5, 3.0, 4.0]
    assert five["speedup_std"] == pytest.approx(math.sqrt(0.5))
    assert [five[f"efficiency{bound}"] for bound in ("", "_low", "_high")] == pytest.approx([0.7, 0.6, 0.8])
    assert [five[f"time_to_target_s{bound}"] for bound in ("", "_low", "_high")] == [15.0, 10.0, 20.0]
    assert five["worker_s_to_target"] == 75.0
    assert (five["base_strategy"], five["base_workers"]) == ("a", 1)
    assert (five["base_strategy"], five["base_workers"], five["speedup_pairs"]) == ("a", 1, 2)
    assert rows.loc["a", 1][["speedup", "speedup_low", "speedup_high"]].tolist() == [1.0, 1.0, 1.0]


def test_seeds_that_never_reach_the_target_are_counted_and_left_out() -> None:
    rows = summary({("a", 1, 0): 40.0, ("a", 1, 1): None, ("a", 1, 2): 50.0, ("a", 2, 0): None, ("a", 2, 1): 10.0})
    one, two = rows.loc["a", 1], rows.loc["a", 2]
    assert (one["reached"], one["seeds"], one["time_to_target_s"]) == (2, 3, 45.0)
    # No seed reached it in both: 45 s on average over 10 s, which is one number and has no spread.
    assert (two["speedup"], two["speedup_low"], two["speedup_high"], two["speedup_pairs"]) == (4.5, 4.5, 4.5, 0)
    assert math.isnan(two["speedup_std"])


def test_one_pair_of_seeds_has_no_spread() -> None:
    """Three seeds each, of which one reached the target in both."""
    times = {("a", 1, 0): 40.0, ("a", 1, 1): None, ("a", 1, 2): 50.0}
    row = summary({**times, ("a", 2, 0): 20.0, ("a", 2, 1): 10.0, ("a", 2, 2): None}).loc["a", 2]
    assert (row["speedup"], row["speedup_pairs"]) == (2.0, 1)
    assert math.isnan(row["speedup_std"])


def test_the_base_where_one_worker_is_missing() -> None:
    never = summary({("a", 1, 0): None, ("a", 2, 0): 30.0, ("a", 6, 0): 15.0})
    assert never.loc["a", 6][["base_strategy", "base_workers"]].tolist() == ["a", 2]
    assert never.loc["a", 6]["speedup"] == 2.0
    assert never.loc["a", 6]["efficiency"] == pytest.approx(2 / 3)  # twice as fast with three times the workers
    assert math.isnan(never.loc["a", 1]["speedup"])
    single = summary({("single", 1, 0): 60.0, ("a", 2, 0): 30.0})
    assert single.loc["a", 2][["base_strategy", "base_workers", "speedup"]].tolist() == ["single", 1, 2.0]
    nobody = summary({("a", 1, 0): None, ("a", 2, 0): None})
    assert nobody.loc["a", 2][["base_strategy", "base_workers"]].tolist() == ["", 0]


def test_several_studies_have_bases_of_their_own() -> None:
    one, other = trials({("a", 1, 0): 10.0, ("a", 2, 0): 5.0}), trials({("a", 1, 0): 30.0, ("a", 2, 0): 10.0})
    rows = analysis.summarise(pd.concat([one, other.assign(study="t")], ignore_index=True))
    assert rows["speedup"].tolist() == [1.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_seed_that_diverged_is_not_hidden(value: float) -> None:
    made = trials({("a", 1, 0): 10.0, ("a", 1, 1): None})
    made.loc[1, "last_metric"] = value
    row = analysis.summarise(made).iloc[0]
    assert math.isnan(row["last_metric"])
    assert row["time_to_target_s"] == 10.0


@given(
    times=st.dictionaries(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 2)), SECONDS, min_size=1, max_size=6),
    factor=st.floats(1e-3, 1e3),
)
@settings(max_examples=30)  # of a table each, which takes long
def test_scaling_all_times_leaves_speedups_unchanged(times: dict[tuple[int, int], float], factor: float) -> None:
    before = summary({("a", workers, seed): time_s for (workers, seed), time_s in times.items()})
    after = summary({("a", workers, seed): time_s * factor for (workers, seed), time_s in times.items()})
    for name in ("speedup", "speedup_low", "speedup_high", "efficiency"):
        assert after[name].tolist() == pytest.approx(before[name].tolist(), nan_ok=True)
    assert after["time_to_target_s"].tolist() == pytest.approx((before["time_to_target_s"] * factor).tolist())


@given(base=st.dictionaries(st.integers(0, 4), SECONDS), times=st.dictionaries(st.integers(0, 4), SECONDS))
def test_speedups_lie_between_the_extremes(base: dict[int, float], times: dict[int, float]) -> None:
    found = analysis.speedups(base, times)
    assert bool(found.values) == bool(base and times)
    assert found.num_pairs == len(base.keys() & times.keys())
    for value in found.values:
        assert min(base.values()) / max(times.values()) <= value <= max(base.values()) / min(times.values())


# --- Amdahl -------------------------------------------------------------------------------------------------------


def test_the_sequential_part_that_a_textbook_asks_for() -> None:
    """Hennessy and Patterson, Computer Architecture: a speed-up of 80 with 100 processors allows 0.25 % serial work."""
    # 80 = 1 / (f + (1 - f) / 100), so f = (1/80 - 1/100) / (1 - 1/100) = 0.0025 / 0.99
    assert amdahl.fit([100], [80.0]).serial_fraction == pytest.approx(0.0025 / 0.99)
    assert amdahl.speedup(100, serial_fraction=0.0025 / 0.99) == pytest.approx(80.0)


PROCESSORS = [2, 3, 4, 5, 6, 7, 8]


def test_a_published_table_of_a_program_with_a_tenth_of_serial_work() -> None:
    """Quinn, Parallel Programming in C with MPI and OpenMP (2003), section 7.5: speed-ups whose experimentally
    determined serial fraction is 0.1 at every number of processors."""
    speedups = [1.82, 2.50, 3.08, 3.57, 4.00, 4.38, 4.71]
    fitted = amdahl.fit(PROCESSORS, speedups)
    assert fitted.serial_fraction == pytest.approx(0.1, abs=5e-4)
    assert fitted.residual < 0.005  # the speed-ups are printed to two decimals
    assert amdahl.speedup(math.inf, serial_fraction=fitted.serial_fraction) == pytest.approx(10, abs=0.05)


def test_a_published_table_whose_serial_fraction_grows() -> None:
    """The second table there: overhead grows with the processors, so that one fraction cannot explain all."""
    speedups = [1.87, 2.61, 3.23, 3.73, 4.14, 4.46, 4.71]
    each = [amdahl.fit([n], [s]).serial_fraction for n, s in zip(PROCESSORS, speedups, strict=True)]
    assert each == pytest.approx([0.070, 0.075, 0.080, 0.085, 0.090, 0.095, 0.100], abs=6e-4)
    together = amdahl.fit(PROCESSORS, speedups)
    assert each[0] < together.serial_fraction < each[-1]
    assert together.residual > 0.05


@given(fraction=st.floats(0, 1), workers=st.lists(st.integers(1, 500), min_size=1, unique=True))
def test_the_fit_recovers_the_fraction_of_exact_curves(fraction: float, workers: list[int]) -> None:
    speedups = [amdahl.speedup(n, serial_fraction=fraction) for n in workers]
    if workers == [1]:
        with pytest.raises(ValueError, match="above 1"):
            amdahl.fit(workers, speedups)
        return
    fitted = amdahl.fit(workers, speedups)
    assert fitted.serial_fraction == pytest.approx(fraction, abs=1e-9)
    assert fitted.residual == pytest.approx(0, abs=1e-4)


@given(points=st.dictionaries(st.integers(2, 64), st.floats(0.05, 200), min_size=1))
def test_no_other_fraction_fits_the_times_better(points: dict[int, float]) -> None:
    workers, speedups = list(points), list(points.values())

    def distance(fraction: float) -> float:
        return sum((1 / s - 1 / amdahl.speedup(n, serial_fraction=fraction)) ** 2 for n, s in points.items())

    fitted = amdahl.fit(workers, speedups).serial_fraction
    assert 0 <= fitted <= 1
    assert all(distance(fitted) <= distance(other / 200) + 1e-12 for other in range(201))


def test_the_table_of_fits(tmp_path: Path) -> None:
    curve = {n: 100 / amdahl.speedup(n, serial_fraction=0.2) for n in (1, 2, 4, 8)}
    made = {("all-reduce", n, 0): reaching(time_s) for n, time_s in curve.items()}
    two_counts = {("ps-bsp", n, 0): reaching(100.0 / n) for n in (1, 2)}
    fits = study(tmp_path / "s", {**made, **two_counts}).frames.amdahl
    assert fits["strategy"].tolist() == ["all-reduce"], "two numbers of workers are no curve"
    assert fits[["serial_fraction", "serial_fraction_low", "serial_fraction_high"]].values[0] == pytest.approx(
        [0.2] * 3
    )


def test_a_fit_ends_where_more_workers_are_slower() -> None:
    """1, 5 and 10 workers take 100, 30 and 25 s; 20 take 60 s, which no serial part explains."""
    fit = analysis.fit_amdahl(analysis.summarise(trials({("a", n, 0): s for n, s in CURVE.items()}))).iloc[0]
    # Of 1/S = 1, 0.3 and 0.25: f = (0.8 x 0.1 + 0.9 x 0.15) / (0.8^2 + 0.9^2) = 0.215 / 1.45
    assert fit["serial_fraction"] == pytest.approx(0.215 / 1.45)
    assert fit["workers"] == 10


CURVE = {1: 100.0, 5: 30.0, 10: 25.0, 20: 60.0}


def test_no_fit_against_more_than_one_worker() -> None:
    rows = analysis.summarise(trials({("a", n, 0): 16 / n for n in (2, 4, 8)}))
    assert rows["speedup"].tolist() == [1.0, 2.0, 4.0]
    assert analysis.fit_amdahl(rows).empty


def test_the_bounds_of_a_fit_come_from_the_spread() -> None:
    made = {("a", n, seed): 10.0 * (1 + 0.5 * seed * (n > 1)) / n for n in (1, 2, 4) for seed in (0, 1)}
    fit = analysis.fit_amdahl(analysis.summarise(trials(made))).iloc[0]
    assert fit["serial_fraction_low"] == 0.0  # seed 0 speeds up in proportion
    assert fit["serial_fraction_low"] < fit["serial_fraction"] < fit["serial_fraction_high"]
