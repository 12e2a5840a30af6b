"""Tables from hand-made records with known answers."""

from __future__ import annotations

import math
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paceline.errors import RunFailed, UsageError
from paceline.lab import step_totals
from paceline.lab.frames import COLUMNS, Frames, table
from paceline.lab.runner import TrialOutcome
from paceline.lab.study import Study
from paceline.records import (
    EvaluationRecord,
    MetricRecord,
    RecordWriter,
    StepRecord,
    UpdateRecord,
)
from tests.lab.made import Made, reaching, study, write_trial


def only(frame: pd.DataFrame) -> pd.Series:
    assert len(frame) == 1
    return frame.iloc[0]


def test_a_trial_worked_out_by_hand(tmp_path: Path) -> None:
    # Two workers take 4 steps of 2.5 s: 60 % compute, 10 % communication, 30 % waiting.
    made = Made(
        [(0, 0.0, 0, 0.1), (2, 5.0, 128, 0.45), (3, 7.5, 192, 0.52), (4, 10.0, 256, 0.48)],
        time_s=10.0, num_steps=4, shares=(0.6, 0.1, 0.3), staleness=2, used_by_others=0.25,
    )  # fmt: skip
    frames = study(tmp_path / "made", {("ps-asp:servers=2", 2, 7): made}).frames
    trial = only(frames.trials)
    expected = {
        "study": "made", "script": "train.py", "strategy": "ps-asp:servers=2", "workers": 2, "seed": 7,
        "trial": "ps-asp_servers=2-n2-s7", "status": "finished", "reason": "", "engine": "ray", "cluster": "",
        "unit": "gradient",
        "servers": 2, "iterations": 4, "training_time_s": 10.0, "samples": 256, "samples_per_s": 25.6,
        "iterations_per_s": 0.4, "target": "accuracy=0.5", "reached": True, "time_to_target_s": 7.5,
        "resolution_s": 2.5,
        "iterations_to_target": 3, "samples_to_target": 192, "worker_s_to_target": 15.0, "server_s_to_target": 15.0,
        "cost_s_to_target": 30.0, "ended_by": "target", "metric": "accuracy", "last_metric": 0.48, "best_metric": 0.52,
        "compute_share": 0.6,
        "communication_share": 0.1, "waiting_share": 0.3, "hidden_share": 0.0, "moved_bytes": 8000,
        "mean_staleness": 2.0, "max_staleness": 2, "used_by_others": 0.25,
        "hold": 1, "passed_targets": "", "setting": "",
    }  # fmt: skip
    assert trial.to_dict() == {name: pytest.approx(value) for name, value in expected.items()}
    assert frames.evaluations["time_s"].tolist() == [0.0, 5.0, 7.5, 10.0]
    assert frames.evaluations["moved_bytes"].tolist() == [0, 4000, 6000, 8000]
    assert frames.workers[["worker", "steps", "compute_s", "communication_s", "waiting_s"]].values.tolist() == [
        [worker, 4, pytest.approx(6.0), pytest.approx(1.0), pytest.approx(3.0)] for worker in (0, 1)
    ]
    assert frames.staleness[["staleness", "count"]].values.tolist() == [[2, 8]]
    assert frames.pace[["time_s", "iteration"]].drop_duplicates().values.tolist() == [
        [2.5, 1], [5.0, 2], [7.5, 3], [10.0, 4]
    ]  # fmt: skip


def test_a_target_that_is_never_reached_is_absent_not_zero(tmp_path: Path) -> None:
    frames = study(tmp_path / "s", {("all-reduce", 1, 0): reaching(10.0, value=0.4999)}).frames
    trial = only(frames.trials)
    assert not trial["reached"]
    absent = [name for name in COLUMNS["trials"] if "to_target" in name]
    assert len(absent) == 6
    assert math.isnan(trial["resolution_s"])
    assert trial[absent].isna().all()
    summary = only(frames.summary)
    assert summary["reached"] == 0
    assert math.isnan(summary["time_to_target_s"])
    assert math.isnan(summary["speedup"])
    assert summary["last_metric"] == 0.4999


@pytest.mark.parametrize(("target", "reached"), [("loss=0.2", True), ("loss=0.05", False), ("loss>=0.1", True)])
def test_metrics_that_fall(tmp_path: Path, target: str, reached: bool) -> None:
    directory = tmp_path / "s"
    made = study(directory, {("single", 1, 0): reaching(10.0)}, target=target)
    writer = RecordWriter(directory / "trials" / "single-n1-s0")
    writer.write([EvaluationRecord(11, 11.0, 1100, {"loss": 0.1, "accuracy": 0.9}, 0.0)])
    writer.close()
    trial = only(made.frames.trials)
    assert trial["reached"] == reached
    assert trial["metric"] == "loss"
    assert trial["best_metric"] == 0.1


def test_failed_and_missing_trials_are_rows_without_measurements(tmp_path: Path) -> None:
    made = study(
        tmp_path / "s",
        {
            ("all-reduce", 1, 0): reaching(10.0),
            ("all-reduce", 2, 0): reaching(4.0, failure="worker 1 (process 7) died during step 3"),
        },
        seeds=(0, 1),
    )
    trials = made.frames.trials.set_index("trial")
    assert trials["status"].to_dict() == {
        "all-reduce-n1-s0": "finished",
        "all-reduce-n2-s0": "failed",
        "all-reduce-n1-s1": "missing",
        "all-reduce-n2-s1": "missing",
    }
    assert trials.loc["all-reduce-n2-s0", "reason"] == "worker 1 (process 7) died during step 3"
    assert trials["reached"].tolist() == [True, False, False, False]
    assert set(made.frames.evaluations["trial"]) == {"all-reduce-n1-s0"}
    two = made.frames.summary.set_index("workers").loc[2]
    assert (two["seeds"], two["failed"], two["reached"]) == (0, 1, 0)
    assert math.isnan(two["samples_per_s"])

    lacking = "3 of 4 trials have no result; the first is all-reduce with 2 workers and seed 0: worker 1 "
    with pytest.raises(RunFailed, match=lacking):
        made.require_finished()


def test_a_study_of_finished_trials_is_whole(tmp_path: Path) -> None:
    made = study(tmp_path / "s", {("all-reduce", 1, 0): reaching(10.0)}, workers=(1,))
    assert made.require_finished() is made


def test_pauses_are_on_no_clock(tmp_path: Path) -> None:
    """Evaluations of 5 s each lie between steps that end at 1 s and 2 s: rates are of the 2 s trained."""
    made = Made([(0, 0.0, 0, 0.1), (1, 1.0, 10, 0.2), (2, 2.0, 20, 0.5)], time_s=2.0, num_steps=2, samples_per_step=10)
    trial = only(study(tmp_path / "s", {("single", 1, 0): made}).frames.trials)
    assert trial["samples_per_s"] == pytest.approx(10.0)
    assert trial["iterations_per_s"] == pytest.approx(1.0)
    assert trial["time_to_target_s"] == 2.0


def test_gradients_that_were_not_applied_have_no_staleness(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    stalenesses = [0, 3, -1, 1, 3]
    writer.write([StepRecord(0, n, n, float(n), 1, 1.0, 0.0, 0.0, 0, s, 0.0) for n, s in enumerate(stalenesses, 1)])
    writer.close()
    assert step_totals.read(tmp_path).staleness == {0: 1, 1: 1, 3: 2}


def test_steps_in_any_order_and_cut_off_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of every size add up to the same; what a kill tore is left out."""
    writer = RecordWriter(tmp_path)
    order = [3, 1, 2, 6, 4, 5, 7]
    writer.write([StepRecord(n % 2, n, n, float(n), 10, 1.0, 0.0, 0.0, 1, 0, 0.0) for n in order])
    writer.close()
    whole = step_totals.read(tmp_path)
    assert whole.pace["iteration"].is_monotonic_increasing
    for num_rows in range(1, 8):
        monkeypatch.setattr(step_totals, "_BLOCK_ROWS", num_rows)
        blocks = step_totals.read(tmp_path)
        assert blocks.samples == 70
        pd.testing.assert_frame_equal(blocks.workers, whole.workers)
        pd.testing.assert_frame_equal(blocks.pace.drop_duplicates(), whole.pace.drop_duplicates())
    path = tmp_path / "steps.csv"
    raw = b"".join(path.read_bytes().splitlines(keepends=True)[:4])
    for length in range(len(raw) + 1):
        path.write_bytes(raw[:length])
        assert step_totals.read(tmp_path).samples == 10 * max(0, raw[:length].count(b"\n") - 1)


def test_damaged_steps_are_named(tmp_path: Path) -> None:
    write_trial(tmp_path / "t", reaching(1.0), workers=1)
    path = tmp_path / "t" / "steps.csv"
    path.write_text(path.read_text() + "0,x,y\n")
    with pytest.raises(UsageError, match=r"steps\.csv holds no steps of this version"):
        step_totals.read(tmp_path / "t")


def test_tables_read_back_as_written(tmp_path: Path) -> None:
    made = study(
        tmp_path / "nan",  # a name that a careless reader takes for a number that is absent
        {("ps-asp", n, s): reaching(8.0 / n + s, samples=960) for n in (1, 2, 4) for s in (0, 1)},
    )
    made.frames.save(tmp_path / "tables")
    again = Frames.load(tmp_path / "tables")
    for name in COLUMNS:
        pd.testing.assert_frame_equal(getattr(again, name), getattr(made.frames, name))
    (tmp_path / "tables" / "pace.csv").write_text("time_s\n1.0\n")
    with pytest.raises(UsageError, match=r"pace\.csv is no table of this version"):
        Frames.load(tmp_path / "tables")


def test_tables_of_versions_that_had_two_units_are_read(tmp_path: Path) -> None:
    made = study(tmp_path / "s", {(name, 1, 0): reaching(8.0) for name in ("ps-asp", "ps-bsp")})
    made.frames.save(tmp_path / "tables")
    for name in ("trials", "summary"):
        path = tmp_path / "tables" / f"{name}.csv"
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        old = frame.assign(unit=frame["unit"] == "update").rename(columns={"unit": "synchronous"})
        old.to_csv(path, index=False)
    again = Frames.load(tmp_path / "tables")
    for name in ("trials", "summary"):
        assert sorted(getattr(again, name)["unit"]) == ["gradient", "update"]
        pd.testing.assert_frame_equal(getattr(again, name), getattr(made.frames, name))


def test_a_study_without_its_trials_is_read_from_its_tables(tmp_path: Path) -> None:
    made = study(tmp_path / "s", {("single", 1, 0): reaching(10.0)})
    made.frames.save(tmp_path / "s" / "tables")
    (tmp_path / "s" / "trials").rename(tmp_path / "elsewhere")
    assert only(Study.open(tmp_path / "s").frames.trials)["time_to_target_s"] == 10.0


def test_an_outcome_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text("{}")
    with pytest.raises(UsageError, match="does not say how the trial ended"):
        TrialOutcome.read(tmp_path)


def test_empty_tables_have_their_types() -> None:
    for name, columns in COLUMNS.items():
        frame = table(name, [])
        assert list(frame.columns) == list(columns)
        assert frame.dtypes.tolist() == [pd.api.types.pandas_dtype(kind) for kind in columns.values()]


@pytest.mark.parametrize("metric", ["", "my acc (%)", "b=c", "\ud800, \n"])
def test_a_metric_may_have_any_name(tmp_path: Path, metric: str) -> None:
    made = study(tmp_path / "s", {("single", 1, 0): reaching(10.0)}, target=None, max_steps=10)
    evaluations = tmp_path / "s" / "trials" / "single-n1-s0" / "evaluations.jsonl"
    evaluations.unlink()
    writer = RecordWriter(evaluations.parent)
    values = enumerate((0.5, math.inf, 0.25), 1)
    writer.write([EvaluationRecord(iteration, 1.0, 1, {metric: value}, 0.0) for iteration, value in values])
    writer.close()
    assert only(made.frames.trials)[["best_metric", "last_metric"]].tolist() == [0.5, 0.25]
    assert made.verdict.lines
    made.frames.save(tmp_path / "tables")
    assert len(Frames.load(tmp_path / "tables").evaluations) == 3


def test_the_reason_of_a_failure_may_hold_what_is_no_text(tmp_path: Path) -> None:
    made = study(tmp_path / "s", {("single", 1, 0): reaching(1.0, failure="read \udcff\udcfe, \U0001f600")})
    made.frames.save(tmp_path / "tables")
    assert only(Frames.load(tmp_path / "tables").trials)["reason"] == "read \\udcff\\udcfe, \U0001f600"
    assert made.verdict.lines[-1].encode().endswith("\\udcfe, \U0001f600.".encode())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_target_is_reached_by_what_is_no_finite_number(tmp_path: Path, value: float) -> None:
    for target in ("accuracy=0.5", "accuracy<=0.5"):
        made = study(tmp_path / target, {("single", 1, 0): Made([(1, 1.0, 9, value)])}, target=target)
        assert not only(made.frames.trials)["reached"]


@pytest.mark.slow
def test_a_million_steps(tmp_path: Path) -> None:
    """Records of a run of 1,000,000 steps stay under 200 MB, and are read in seconds and in bounded memory."""
    num_steps, num_sampled = 1_000_000, 10_000
    (tmp_path / "sampled").mkdir()
    writer = RecordWriter(tmp_path / "sampled")
    for n in range(num_steps - num_sampled, num_steps):  # the last ones, whose numbers are longest
        second = n * 0.0131
        writer.write(
            [
                StepRecord(n % 10, n // 10, n, second, 100, 0.0105123, 0.0021123, 0.0004123, 1_234_567, 9, 0.001),
                MetricRecord(n % 10, n // 10, n, second + 1 / 3, "loss", 2 / 3),
                UpdateRecord(0, n, n % 10, n // 10, 9),
            ]
        )
    writer.close()
    sampled_bytes = sum(path.stat().st_size for path in (tmp_path / "sampled").iterdir())
    assert sampled_bytes / num_sampled * num_steps < 200e6

    number = np.arange(1, num_steps + 1)
    frame = pd.DataFrame(
        {
            "worker": number % 10, "step": number // 10, "iteration": number, "time_s": number * 0.0131,
            "samples": 100, "compute_s": 0.0105, "communication_s": 0.0021, "waiting_s": 0.0004,
            "moved_bytes": 1_234_567, "staleness": number % 20, "hidden_s": 0.001,
        }
    )  # fmt: skip
    frame.to_csv(tmp_path / "steps.csv", index=False, float_format="%.6f")
    tracemalloc.start()
    began_s = time.process_time()
    totals = step_totals.read(tmp_path)
    took_s, (_, peak_bytes) = time.process_time() - began_s, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"read in {took_s:.1f} s, at most {peak_bytes / 1e6:.0f} MB")
    assert (totals.samples, totals.iterations) == (100 * num_steps, num_steps)
    assert totals.workers["moved_bytes"].sum() == 1_234_567 * num_steps
    assert len(totals.pace) <= 300
    assert took_s < 20
    assert peak_bytes < 200e6
