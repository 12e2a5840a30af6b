"""Hardware against statistical efficiency: samples a second, and samples that the target takes."""

import math

import pandas as pd
import plotly.graph_objects as go

from paceline.lab.figures import logarithmic
from paceline.lab.figures.chart import Chart, Subject, canvas, curve, whiskers
from paceline.lab.figures.style import FAINT

_HEIGHT_PX = 420


def efficiency(subject: Subject) -> list[Chart]:
    """One chart. On its diagonals, which are logarithmic axes' lines of y / x, the time to target is the same."""
    summary = subject.frames.summary
    # Logarithmic axes have no place for a target that was reached before the first step.
    has_place = (summary["samples_to_target_low"] > 0) & (summary["samples_per_s_low"] > 0)
    reached = summary[has_place]
    if reached.empty:
        return []
    per_second = f"per {'virtual ' if subject.is_virtual else ''}second"
    plot = canvas(
        x_title=f"Hardware efficiency (samples/{subject.unit})",  # a longer one is cut off on a phone
        y_title="Statistical efficiency (samples to target)",
        height_px=_HEIGHT_PX,
    )
    x_span, y_span = _span(reached, "samples_per_s"), _span(reached, "samples_to_target")
    _equal_times(plot, x_span, y_span, subject.unit)
    for strategy in subject.strategies:
        rows = reached[reached["strategy"] == strategy].sort_values("workers")
        if len(rows):
            _points(plot, subject, strategy, rows)
    plot.update_xaxes(logarithmic.axis(x_span))
    plot.update_yaxes(logarithmic.axis(y_span))
    words = "; ".join(
        f"{row.strategy} at {row.workers} workers: {row.samples_per_s:,.0f} samples {per_second}, "
        f"{row.samples_to_target:,.0f} samples to the target"
        for row in reached.itertuples()
    )
    never = summary[(summary["reached"] == 0) & (summary["seeds"] > 0)]
    at_once = summary[(summary["reached"] > 0) & ~has_place]
    notes = [
        f"Not shown, as it never reached the target: {row.strategy} × {row.workers}." for row in never.itertuples()
    ]
    notes += [
        f"Not shown, as a seed reached the target before its first step: {row.strategy} × {row.workers}."
        for row in at_once.itertuples()
    ]
    said = f"Samples to target against samples {per_second}. {words}."
    return [Chart("", "", plot, said, _table(reached, subject.unit), tuple(notes))]


def _points(plot: go.Figure, subject: Subject, strategy: str, rows: pd.DataFrame) -> None:
    style = subject.strategy_styles[strategy]
    axes = {"x": "samples_per_s", "y": "samples_to_target"}
    errors = {f"error_{axis}": whiskers(rows, name, style.colour, thickness=1) for axis, name in axes.items()}
    numbers = {axis: rows[name].tolist() for axis, name in axes.items()}
    labels = {"text": [str(count) for count in rows["workers"]], "textposition": "top center", "textfont": {"size": 11}}
    plot.add_trace(curve(strategy, style, width=1.5, size=9, mode="lines+markers+text", **numbers, **labels, **errors))


def _span(rows: pd.DataFrame, column: str) -> list[float]:
    return logarithmic.span_of([*rows[f"{column}_low"], *rows[f"{column}_high"]])


def _equal_times(plot: go.Figure, x_span: list[float], y_span: list[float], unit: str) -> None:
    """Lines on which samples to target over samples a second is the same round number of seconds."""
    for exponent in range(math.floor(y_span[0] - x_span[1]), math.ceil(y_span[1] - x_span[0]) + 1):
        for step in (1, 2, 5):
            seconds = step * 10.0**exponent
            log_s = math.log10(seconds)
            first, last = max(x_span[0], y_span[0] - log_s), min(x_span[1], y_span[1] - log_s)
            if last - first < 0.15:
                continue
            plot.add_trace(
                go.Scatter(
                    x=[10**first, 10**last],
                    y=[10 ** (first + log_s), 10 ** (last + log_s)],
                    mode="lines",
                    line={"color": FAINT, "width": 1, "dash": "1px 4px"},
                    showlegend=False,
                    hoverinfo="skip",
                )
            )
            plot.add_annotation(
                x=last,
                y=last + log_s,
                text=f"{seconds:g} {unit}",
                showarrow=False,
                xanchor="right",
                yanchor="top",
                font={"size": 10, "color": FAINT},
            )


def _table(reached: pd.DataFrame, unit: str) -> pd.DataFrame:
    columns = [c for q in ("samples_per_s", "samples_to_target") for c in (q, f"{q}_low", f"{q}_high")]
    headings = [
        f"{name}{which}"
        for name in (f"samples/{unit}", "samples to target")
        for which in (", mean", ", lowest", ", highest")
    ]
    return reached[["strategy", "workers", *columns]].set_axis(["strategy", "workers", *headings], axis="columns")
