"""The figures of studies with little in them, or with numbers beyond the usual."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from paceline.lab.analysis import fit_amdahl, summarise
from paceline.lab.figures import Subject, efficiency, figures, staleness
from paceline.lab.figures.scaling import speedup
from paceline.lab.frames import Frames
from tests.lab import example_study
from tests.lab.drawn_figures import drawn_of, trace_of, typical_of

# --- studies with little in them -----------------------------------------------------------------------------------


def _only(frames: Frames, **values: object) -> Frames:
    """The rows with these values, analysed anew."""
    kept = {}
    for name in ("trials", "evaluations", "workers", "staleness", "pace"):
        rows = getattr(frames, name)
        for column, value in values.items():
            rows = rows[rows[column] == value]
        kept[name] = rows.reset_index(drop=True)
    summary = summarise(kept["trials"])
    return Frames(**kept, summary=summary, amdahl=fit_amdahl(summary))


def _keys(frames: Frames) -> set[str]:
    return set(drawn_of(frames))


def test_one_trial_is_enough() -> None:
    one = _only(example_study.frames(), strategy="ps-asp", workers=2, seed=0)
    assert _keys(one) >= {"time-to-target", "convergence", "training", "iteration-rate", "shares", "staleness", "cost"}


def test_a_target_that_nobody_reached_leaves_only_words() -> None:
    never = _only(example_study.frames(), strategy="ps-asp", workers=10)
    drawn = {figure.key: figure for figure in figures([Subject("example", "train.py", never)])}
    assert "speed-up" not in drawn
    assert "efficiency" not in drawn
    (ranking,) = drawn["time-to-target"].rows[0]
    assert ranking is not None
    assert not typical_of(ranking.plot)
    assert "never reached" in ranking.alternative


def test_a_study_of_failures_draws_no_figures_of_numbers() -> None:
    frames = example_study.frames()
    trials = frames.trials[frames.trials["status"] == "failed"].reset_index(drop=True)
    none = {name: getattr(frames, name).iloc[:0] for name in ("evaluations", "workers", "staleness", "pace")}
    summary = summarise(trials)
    keys = _keys(Frames(trials=trials, summary=summary, amdahl=fit_amdahl(summary), **none))
    assert keys <= {"time-to-target", "cost"}


def test_without_a_target_there_are_curves_and_no_rankings() -> None:
    frames = example_study.frames()
    lacking = frames.trials.assign(target="", reached=False)
    for column in [name for name in lacking.columns if name.endswith("_to_target") or name.endswith("_to_target_s")]:
        lacking[column] = math.nan
    summary = summarise(lacking)
    keys = _keys(replace(frames, trials=lacking, summary=summary, amdahl=fit_amdahl(summary)))
    assert "convergence" in keys
    assert not keys & {"time-to-target", "cost", "speed-up", "efficiency"}


def test_where_a_seed_diverges_the_mean_ends_and_its_last_good_value_counts_no_further() -> None:
    frames = example_study.frames()
    evaluations, trials = frames.evaluations.copy(), frames.trials.copy()
    lost = (evaluations["trial"] == "ps-asp-n2-s1") & (evaluations["iteration"] > 50)
    evaluations.loc[lost, "value"] = math.nan
    evaluations.loc[lost & (evaluations["iteration"] > 70), "value"] = 0.1  # finite again, of a model that is no more
    trials.loc[trials["trial"] == "ps-asp-n2-s1", "reached"] = False
    drawn = drawn_of(replace(frames, evaluations=evaluations, trials=trials))
    note = "2 workers, seed 1: accuracy is no finite number from iteration 60 on."
    chart = drawn["convergence"]["ps-asp"]
    assert chart.notes == (note,)
    assert all(math.isfinite(y) for trace in chart.plot.data for y in trace.y)
    assert max(trace_of(chart.plot, "2 workers").x) == 50
    assert max(trace_of(chart.plot, "5 workers").x) > 500
    last_s = evaluations.loc[(evaluations["trial"] == "ps-asp-n2-s1") & ~lost, "time_s"].max()
    assert max(trace_of(drawn["training"]["ps-asp"].plot, "2 workers").x) <= last_s
    assert "ps-asp" not in "".join(drawn["synchrony"]["samples"].notes)  # which is of another number of workers


def test_a_seed_that_never_was_a_number_leaves_no_mean_of_the_others() -> None:
    frames = _only(example_study.frames(), strategy="ps-asp")
    evaluations = frames.evaluations.copy()
    evaluations.loc[evaluations["trial"] == "ps-asp-n2-s1", "value"] = math.inf
    chart = drawn_of(replace(frames, evaluations=evaluations))["convergence"]["ps-asp"]
    assert "2 workers" not in [trace.name for trace in chart.plot.data]
    assert "5 workers" in [trace.name for trace in chart.plot.data]
    assert chart.notes == ("2 workers, seed 1: accuracy is no finite number from iteration 10 on.",)


# --- numbers beyond the usual --------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1e-3, 0.3, 1, 37, 3_000, 4e7])
def test_a_speed_up_of_any_size_has_a_few_ticks(times: float) -> None:
    frames = example_study.frames()
    scaled = frames.summary.copy()
    scaled[["speedup", "speedup_low", "speedup_high"]] *= times
    (chart,) = speedup(Subject("example", "train.py", replace(frames, summary=scaled)))
    assert 3 <= len(chart.plot.layout.yaxis.tickvals) <= 9


def test_a_target_reached_before_the_first_step_has_no_place_on_logarithmic_axes() -> None:
    frames = example_study.frames()
    summary = frames.summary.copy()
    at_once = (summary["strategy"] == "ps-ssp") & (summary["workers"] == 2)
    summary.loc[at_once, ["samples_to_target", "samples_to_target_low", "samples_to_target_high"]] = 0.0
    (chart,) = efficiency.efficiency(Subject("example", "train.py", replace(frames, summary=summary)))
    assert "Not shown, as a seed reached the target before its first step: ps-ssp × 2." in chart.notes
    assert "2" not in trace_of(chart.plot, "ps-ssp").text


def test_a_few_gradients_far_staler_than_the_rest_are_named_and_not_drawn() -> None:
    frames = example_study.frames()
    rows = frames.staleness
    odd = rows[rows["trial"].isin(["ps-asp-n5-s0", "ps-asp-n10-s0"])].drop_duplicates("trial")
    stale = pd.concat([rows, odd.assign(staleness=100_000, count=1)], ignore_index=True)
    chart = next(
        chart
        for chart in staleness.staleness(Subject("e", "t.py", replace(frames, staleness=stale)))
        if chart.key == "ps-asp"
    )
    num = int(stale.loc[(stale["strategy"] == "ps-asp") & (stale["workers"] == 5), "count"].sum())
    assert chart.notes[0] == f"Not shown with 5 workers: 1 of {num:,} gradients, staler than 199, up to 100,000."
    assert [note[:14] for note in chart.notes] == ["Not shown with"] * 2
    assert "5 workers: mean" in chart.alternative
    assert "at most 100000" in chart.alternative
    assert max(len(trace.x) for trace in chart.plot.data) == 202
    assert [name for name in chart.table["staleness"] if "more" in name] == ["more than 199"] * 2
    assert chart.table["gradients"].sum() == stale.loc[stale["strategy"] == "ps-asp", "count"].sum()


def test_staleness_of_any_size_is_drawn_in_few_bins() -> None:
    frames = _only(example_study.frames(), strategy="ps-asp", workers=5, seed=0)
    row = frames.staleness.iloc[0]
    spread = pd.DataFrame([{**row, "staleness": 7 * index, "count": 1} for index in range(5_000)])
    (chart,) = staleness.staleness(Subject("e", "t.py", replace(frames, staleness=spread)))
    (outline,) = chart.plot.data
    assert len(outline.x) <= 202
    assert len(chart.table) <= 201
    assert 0.98 < sum(outline.y) <= 1
    # A bin's share stands at the middle of its numbers: the mean comes out as it is of the numbers themselves.
    shown = spread["staleness"][spread["staleness"] <= max(outline.x)]
    assert np.average(outline.x, weights=outline.y) == pytest.approx(shown.mean(), rel=0.01)


def test_a_figure_that_cannot_be_drawn_says_so_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rows: pd.DataFrame, column: str) -> list[float]:
        raise ZeroDivisionError("odd numbers")

    monkeypatch.setattr(efficiency, "_span", broken)
    drawn = {figure.key: figure for figure in figures([Subject("example", "train.py", example_study.frames())])}
    assert re.fullmatch(r"ZeroDivisionError: odd numbers \(efficiency\.py:\d+\)", drawn["efficiency"].failure)
    assert [figure.key for figure in drawn.values() if figure.failure] == ["efficiency"]
    assert len(drawn) == 12
    assert all(figure.rows for figure in drawn.values() if not figure.failure)
