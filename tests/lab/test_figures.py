"""The figures: what they draw of which numbers, told apart without colour, with units, and nothing drawn as zero."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab import figures as lab_figures
from paceline.lab.figures import Chart, Subject, figures
from paceline.lab.figures.curves import NUM_POINTS, Curve, band
from paceline.lab.figures.style import plain, strategy_styles, worker_styles
from tests.lab import example_study
from tests.lab.drawn_figures import drawn_of, trace_of, typical_of


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject("example", "train.py", example_study.frames())


@pytest.fixture(scope="module")
def charts(subject: Subject) -> dict[str, dict[str, Chart]]:
    """By figure, then by what the chart is of."""
    return drawn_of(subject.frames)


@pytest.fixture(scope="module")
def simulated() -> dict[str, dict[str, Chart]]:
    """The same study's, of a simulated cluster."""
    return drawn_of(example_study.frames(engine="virtual"))


def _floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


# --- mean and spread -----------------------------------------------------------------------------------------------


def test_a_band_is_mean_least_and_greatest_at_each_point() -> None:
    found = band([Curve(_floats(0, 10, 20), _floats(0, 1, 2)), Curve(_floats(0, 10, 20), _floats(0, 3, 6))])
    assert found.x.tolist() == [0, 10, 20]
    assert found.mean.tolist() == [0, 2, 4]
    assert found.low.tolist() == [0, 1, 2]
    assert found.high.tolist() == [0, 3, 6]


def test_a_run_that_ended_early_holds_its_last_value_or_ends_the_mean() -> None:
    short, long = (_floats(0, 10), _floats(0, 1)), (_floats(0, 10, 20), _floats(0, 0.5, 1))
    for holds_long in (False, True):
        held = band([Curve(*short, holds_last=True), Curve(*long, holds_last=holds_long)])
        assert (held.x[-1], held.mean[-1], held.low[-1]) == (20, 1.0, 1.0)
        cut = band([Curve(*short), Curve(*long, holds_last=holds_long)])
        assert (cut.x[-1], cut.mean[-1], cut.low[-1]) == (10, 0.75, 0.5)


_CURVE = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300).map(
    lambda ys: (np.arange(len(ys), dtype=float), np.array(ys))
)


@given(st.lists(_CURVE, min_size=1, max_size=4), st.booleans())
def test_a_band_holds_its_mean_and_stays_small(curves: list[tuple[np.ndarray, np.ndarray]], holds_last: bool) -> None:
    found = band([Curve(*points, holds_last=holds_last) for points in curves])
    slack = 1e-6 * max(1.0, float(np.abs(found.high).max()), float(np.abs(found.low).max()))
    assert len(found.x) <= NUM_POINTS
    assert (np.diff(found.x) > 0).all()
    assert (found.low <= found.mean + slack).all()
    assert (found.mean <= found.high + slack).all()
    ends = [x[-1] for x, _ in curves]
    assert found.x[-1] == (max(ends) if holds_last else min(ends))


# --- styles --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40))
def test_strategies_are_told_apart_without_colour(number: int) -> None:
    styles = strategy_styles([f"s{index}" for index in range(number)]).values()
    assert len({(style.dash, style.marker) for style in styles}) == number
    if number <= 8:
        for part in ("dash", "marker", "pattern", "colour"):
            assert len({getattr(style, part) for style in styles}) == number


@given(st.sets(st.integers(1, 512), min_size=1, max_size=12))
def test_worker_counts_are_told_apart_without_colour(counts: set[int]) -> None:
    styles = worker_styles(sorted(counts))
    assert len({(style.dash, style.marker) for style in styles.values()}) == len(counts)


def test_the_same_strategy_looks_the_same_in_two_studies(subject: Subject) -> None:
    order = ("ps-asp", "gossip", "ps-bsp:servers=2", "all-reduce", "ps-ssp")
    other = replace(subject, all_strategies=order)
    drawn = figures([other, other])
    for figure in drawn:
        for left, right in figure.rows:
            assert left is not None
            assert right is not None
            assert left.plot == right.plot


def test_names_are_no_markup() -> None:
    assert plain("<b>x</b> & y") == "&lt;b&gt;x&lt;/b&gt; &amp; y"


# --- every figure --------------------------------------------------------------------------------------------------


def test_every_chart_has_titled_axes_a_text_and_a_table(charts: dict[str, dict[str, Chart]]) -> None:
    unitless = {"Samples trained on", "Strategy × workers", "Samples to target (statistical efficiency)"}
    for kind, found in charts.items():
        for chart in found.values():
            for title in (chart.plot.layout.xaxis.title.text, chart.plot.layout.yaxis.title.text):
                assert title in unitless or "(" in title, (kind, title)
            assert len(chart.alternative) > 40
            assert len(chart.table) > 0


def test_axes_of_iterations_say_what_one_is(subject: Subject) -> None:
    trials = subject.frames.trials
    units = trials["unit"].where(trials["strategy"] != "all-reduce", "round")
    drawn = drawn_of(replace(subject.frames, trials=trials.assign(unit=units)))
    expected = {"all-reduce": "rounds", "ps-bsp:servers=2": "global updates", "ps-asp": "gradients applied"}
    for strategy, unit in expected.items():
        assert drawn["convergence"][strategy].plot.layout.xaxis.title.text == f"Iterations ({unit})"
        assert drawn["iteration-rate"][strategy].plot.layout.yaxis.title.text == f"Iterations ({unit})"


def test_lines_differ_in_dash_and_marker_and_bars_in_pattern(charts: dict[str, dict[str, Chart]]) -> None:
    for chart in [*charts["convergence"].values(), *charts["synchrony"].values(), *charts["traffic"].values()]:
        lines = [trace for trace in chart.plot.data if trace.mode == "lines+markers"]
        assert len(lines) == 4
        assert len({line.line.dash for line in lines}) == 4
        assert len({line.marker.symbol for line in lines}) == 4
    for kind in ("shares", "per-worker"):
        for chart in charts[kind].values():
            assert len({bar.marker.pattern.shape for bar in chart.plot.data}) == 4


def test_virtual_time_is_marked_on_every_axis_of_time(
    charts: dict[str, dict[str, Chart]], simulated: dict[str, dict[str, Chart]]
) -> None:
    real, virtual = (
        [axis.title.text for chart in _each(drawn) for axis in (chart.plot.layout.xaxis, chart.plot.layout.yaxis)]
        for drawn in (charts, simulated)
    )
    of_time = [title for title in real if re.search(r"\(s\)|/s\)|second|Speed-up|of the time", title)]
    assert len(of_time) >= 12
    for title, counterpart in zip(real, virtual, strict=True):
        assert ("virtual" in counterpart.lower()) == (title in of_time), (title, counterpart)
        assert "virtual" not in title.lower()


def test_every_plot_of_a_simulated_cluster_names_it(
    charts: dict[str, dict[str, Chart]], simulated: dict[str, dict[str, Chart]]
) -> None:
    """Also one that is saved as a picture and shown without its page."""
    for drawn, expected in ((charts, False), (simulated, True)):
        titles = [chart.plot.layout.xaxis.title.text for chart in _each(drawn)]
        assert len(titles) > 20
        assert {">simulated cluster rack &amp; pinion<" in title for title in titles} == {expected}


def test_a_virtual_study_beside_a_real_one_shares_no_axis_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [kind for kind in lab_figures._KINDS if kind.key == "training"]
    monkeypatch.setattr(lab_figures, "_KINDS", kinds)  # drawing the others would take seconds
    real = Subject("real", "train.py", example_study.frames())
    virtual = Subject("virtual", "train.py", example_study.frames(engine="virtual", slowdown=9.0))
    (training,) = figures([real, virtual])
    left, right = training.rows[0]
    assert left is not None
    assert right is not None
    assert right.plot.layout.xaxis.range[1] > 5 * left.plot.layout.xaxis.range[1]
    assert right.plot.layout.yaxis.range == left.plot.layout.yaxis.range


def _each(drawn: dict[str, dict[str, Chart]]) -> list[Chart]:
    return [chart for found in drawn.values() for chart in found.values()]


# --- single figures ------------------------------------------------------------------------------------------------


def test_convergence_draws_the_mean_of_the_seeds(subject: Subject, charts: dict[str, dict[str, Chart]]) -> None:
    line = trace_of(charts["convergence"]["all-reduce"].plot, "10 workers")
    evaluations = subject.frames.evaluations
    rows = evaluations[(evaluations["strategy"] == "all-reduce") & (evaluations["workers"] == 10)]
    means = rows.groupby("iteration")["value"].agg(["mean", "count"])
    for x, y in zip(line.x, line.y, strict=True):
        if means.loc[x, "count"] == 3:
            assert y == pytest.approx(means.loc[x, "mean"])


def test_iteration_rate_draws_the_mean_time_to_each_iteration(
    subject: Subject, charts: dict[str, dict[str, Chart]]
) -> None:
    line = trace_of(charts["iteration-rate"]["ps-asp"].plot, "5 workers")
    assert (line.x[0], line.y[0]) == (0.0, 0)
    trials = subject.frames.trials
    rows = trials[(trials["strategy"] == "ps-asp") & (trials["workers"] == 5)]
    assert line.y[-1] == rows["iterations"].min()
    assert line.x[-1] == pytest.approx((rows["iterations"].min() / rows["iterations_per_s"]).mean())


def test_axes_that_count_the_same_share_a_range(charts: dict[str, dict[str, Chart]]) -> None:
    layouts = {key: chart.plot.layout for key, chart in charts["convergence"].items()}
    assert layouts["all-reduce"].xaxis.range == layouts["ps-bsp:servers=2"].xaxis.range
    assert layouts["ps-ssp"].xaxis.range == layouts["ps-asp"].xaxis.range
    assert layouts["ps-asp"].xaxis.range[1] > 2 * layouts["all-reduce"].xaxis.range[1]
    assert len({layout.yaxis.range for layout in layouts.values()}) == 1
    low, high = layouts["all-reduce"].yaxis.range
    assert low < 0.1 < example_study.TARGET < high


def test_what_never_reached_lies_below_zero_and_is_named(charts: dict[str, dict[str, Chart]]) -> None:
    chart = charts["speed-up"][""]
    marks = next(trace for trace in chart.plot.data if trace.text is not None)
    assert marks.x == (10,)
    assert marks.y[0] < 0
    assert marks.text == ("ps-asp: never",)
    assert min(chart.plot.layout.yaxis.tickvals) == 0
    assert "Never reached the target: ps-asp at 10 workers." in chart.notes
    drawn = [y for trace in chart.plot.data if trace is not marks for y in trace.y]
    assert min(drawn) > 0
    assert "the mean is of the 2 of 3 seeds that reached" in " ".join(chart.notes)


def test_the_ideal_and_the_fits_are_drawn(subject: Subject, charts: dict[str, dict[str, Chart]]) -> None:
    plot = charts["speed-up"][""].plot
    ideal = trace_of(plot, "ideal")
    assert (ideal.x, ideal.y) == ((1, 10), (1, 10))
    fits = subject.frames.amdahl
    assert len(fits) >= 3
    assert fits["workers"].nunique() > 1
    for fit in fits.itertuples():
        curve = trace_of(plot, f"Amdahl's fit, {fit.strategy}")
        assert (curve.x[0], curve.x[-1]) == (1, fit.workers), "past its fastest the law says nothing"
        assert curve.y[0] == pytest.approx(1.0)
        assert curve.y[-1] == pytest.approx(1 / (fit.serial_fraction + (1 - fit.serial_fraction) / fit.workers))


def test_rankings_go_from_best_to_never(subject: Subject, charts: dict[str, dict[str, Chart]]) -> None:
    for kind, quantity in (("time-to-target", "time_to_target_s"), ("cost", "cost_s_to_target")):
        plot = charts[kind][""].plot
        typical = {label: x for trace in typical_of(plot) for label, x in zip(trace.y, trace.x, strict=True)}
        rows = list(plot.layout.yaxis.categoryarray)[::-1]
        values = [typical[row] for row in rows if row in typical]
        assert values == sorted(values)
        assert len(values) == int((subject.frames.summary["reached"] > 0).sum())
        assert min(values) == pytest.approx(subject.frames.summary[quantity].min(), rel=0.01)
        assert rows[-1] == "ps-asp × 10"
        assert [note.text for note in plot.layout.annotations] == ["✕ never reached"]
        last = charts[kind][""].table.iloc[-1]
        assert last.iloc[:3].tolist() == ["ps-asp", 10, "never reached"]


def test_every_run_has_its_dot_and_what_ended_is_told_from_what_arrived(
    subject: Subject, charts: dict[str, dict[str, Chart]]
) -> None:
    chart = charts["time-to-target"][""]
    dots = {
        what: [x for t in chart.plot.data if t.name == what for x in t.x] for what in ("run", "ended before it arrived")
    }
    finished = subject.finished
    assert sorted(dots["run"]) == pytest.approx(sorted(finished["time_to_target_s"].dropna()))
    ended = finished.loc[~finished["reached"], "training_time_s"]
    assert len(ended) == 4
    assert sorted(dots["ended before it arrived"]) == pytest.approx(sorted(ended))
    assert "ps-asp × 5, seed 2: not reached when --max-time ended it." in chart.notes


def test_full_marks_cross_the_line_of_the_best_and_hollow_ones_do_not(charts: dict[str, dict[str, Chart]]) -> None:
    plot = charts["time-to-target"][""].plot
    line = plot.layout.shapes[0].x0
    for trace in typical_of(plot):
        for label, x, below, symbol in zip(
            trace.y, trace.x, trace.error_x.arrayminus, trace.marker.symbol, strict=True
        ):
            may_be_best = not symbol.endswith("-open")
            assert may_be_best == (x - below <= line * (1 + 1e-9)), label
            assert may_be_best or not label.startswith("≈")


def test_shares_add_up_and_overlap_is_taken_out_of_compute(
    subject: Subject, charts: dict[str, dict[str, Chart]]
) -> None:
    plot = charts["shares"]["all-reduce"].plot
    totals = np.sum([trace.y for trace in plot.data], axis=0)
    assert totals == pytest.approx(np.ones(len(totals)))
    workers = subject.frames.workers
    ten = workers[(workers["strategy"] == "all-reduce") & (workers["workers"] == 10)]
    whole = (ten["compute_s"] + ten["communication_s"] + ten["waiting_s"]).sum()
    assert trace_of(plot, "overlapped").y[-1] == pytest.approx(ten["hidden_s"].sum() / whole)
    assert trace_of(plot, "waiting").y[-1] == pytest.approx(ten["waiting_s"].sum() / whole)


def test_the_straggler_shows_in_its_bar(charts: dict[str, dict[str, Chart]]) -> None:
    waiting = trace_of(charts["per-worker"]["all-reduce"].plot, "waiting").y
    assert len(waiting) == 10
    assert waiting[9] < min(waiting[:9])


def test_staleness_is_a_histogram_of_each_asynchronous_strategy(charts: dict[str, dict[str, Chart]]) -> None:
    assert set(charts["staleness"]) == {"ps-ssp", "ps-asp"}
    for chart in charts["staleness"].values():
        for trace in chart.plot.data:
            assert sum(trace.y) == pytest.approx(1.0)


def test_points_on_a_diagonal_take_the_same_time(charts: dict[str, dict[str, Chart]]) -> None:
    diagonals = [trace for trace in charts["efficiency"][""].plot.data if trace.mode == "lines"]
    assert diagonals
    for line in diagonals:
        first_s, last_s = (y / x for x, y in zip(line.x, line.y, strict=True))
        assert first_s == pytest.approx(last_s)
