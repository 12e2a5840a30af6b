"""Speed-up: the time of one worker to the target over the time of n, with the ideal and Amdahl's fit."""

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from paceline.lab import amdahl, words
from paceline.lab.figures.chart import Chart, Subject, canvas, curve, ideal, reached_in_part, whiskers
from paceline.lab.figures.style import FAINT, plain

_HEIGHT_PX = 420
_ROOM = 1.35  # how far above the best speed-up the plot goes; the ideal line may leave it
_NUM_FIT_POINTS = 60
_MAX_TICKS = 8
_STRIP = 0.07  # height of a line below zero, in parts of the plot above it


def speedup(subject: Subject) -> list[Chart]:
    """One chart: all strategies, with the ideal line."""
    summary = subject.frames.summary
    if subject.target is None or not summary["speedup"].notna().any():
        return []
    plot = canvas(
        x_title="Workers (number)",
        y_title=f"Speed-up (times the base{', virtual time' if subject.is_virtual else ''})",
        height_px=_HEIGHT_PX,
    )
    most = max(subject.counts)
    top = max(_ROOM * float(summary["speedup_high"].max()), 1.2)
    ideal(plot, most, most)
    never = summary[(summary["reached"] == 0) & (summary["seeds"] > 0)]
    notes = [f"Never reached the target: {row.strategy} at {row.workers} workers." for row in never.itertuples()]
    notes += reached_in_part(summary)
    for strategy in subject.strategies:
        rows = summary[(summary["strategy"] == strategy) & summary["speedup"].notna()].sort_values("workers")
        if len(rows):
            _measured(plot, subject, strategy, rows)
            _fit(plot, subject, strategy)
    plot.update_xaxes(tickmode="array", tickvals=subject.counts, range=[min(subject.counts) - 0.5, most + 0.5])
    _scale(plot, top, _draw_never(plot, subject, never, top))
    reached = summary[summary["speedup"].notna()]
    best = reached.loc[reached["speedup"].idxmax()]
    words = (
        f"Speed-up against workers. The largest is {best['speedup']:.2f} with {best['strategy']} at "
        f"{best['workers']} workers. {' '.join(notes)}"
    )
    notes += [f"Base of the speed-up: {', '.join(dict.fromkeys(_bases(reached)))}.", *_fits_in_words(subject)]
    return [Chart("", "", plot, words.strip(), _table(reached), tuple(notes))]


def _measured(plot: go.Figure, subject: Subject, strategy: str, rows: pd.DataFrame) -> None:
    style = subject.strategy_styles[strategy]
    errors = whiskers(rows, "speedup", style.colour, width=4)
    plot.add_trace(
        curve(strategy, style, size=9, x=rows["workers"].tolist(), y=rows["speedup"].tolist(), error_y=errors)
    )


def _fit(plot: go.Figure, subject: Subject, strategy: str) -> None:
    """As far as it goes: past the fastest number of workers the law says nothing."""
    fits = subject.frames.amdahl
    fits = fits[fits["strategy"] == strategy]
    if fits.empty:
        return
    fraction = float(fits["serial_fraction"].iloc[0])
    workers = np.linspace(1, int(fits["workers"].iloc[0]), _NUM_FIT_POINTS)
    points = {"x": workers.tolist(), "y": [amdahl.speedup(n, serial_fraction=fraction) for n in workers.tolist()]}
    quiet: dict[str, Any] = {"mode": "lines", "legendgroup": plain(strategy), "showlegend": False, "hoverinfo": "skip"}
    style, dots = subject.strategy_styles[strategy], {"dash": "1px 3px"}
    plot.add_trace(curve(f"Amdahl's fit, {strategy}", style, width=1, line=dots, **points, **quiet))


def _draw_never(plot: go.Figure, subject: Subject, never: pd.DataFrame, top: float) -> float:
    """Mark what never reached the target in a strip of its own below zero; returns the strip's height."""
    strategies = list(dict.fromkeys(never["strategy"]))
    for place, strategy in enumerate(strategies):
        style = subject.strategy_styles[strategy]
        counts = never.loc[never["strategy"] == strategy, "workers"].tolist()
        label: dict[str, Any] = {"text": [f"{plain(strategy)}: never"] * len(counts), "textfont": {"size": 11}}
        label |= {"mode": "markers+text", "textposition": "middle left", "showlegend": False, "hoverinfo": "skip"}
        points = {"x": counts, "y": [-_STRIP * top * (place + 0.75)] * len(counts)}
        plot.add_trace(curve(strategy, style, size=9, marker={"symbol": style.marker + "-open"}, **points, **label))
    return _STRIP * top * (len(strategies) + 0.5) if strategies else 0.0


def _scale(plot: go.Figure, top: float, strip: float) -> None:
    """Ticks from zero upward only: what lies below is no number."""
    plot.update_yaxes(range=[-strip, top], tickvals=np.arange(0, top, _tick_step(top)).tolist(), tickmode="array")
    if strip:
        plot.add_hline(y=0, line={"color": FAINT, "width": 1})


def _tick_step(top: float) -> float:
    """The smallest of 1, 2 and 5 in any decade with which there are not too many ticks up to `top`."""
    decade = 10.0 ** math.floor(math.log10(top / _MAX_TICKS))
    return next(step for step in (decade, 2 * decade, 5 * decade, 10 * decade) if top / step <= _MAX_TICKS)


def _fits_in_words(subject: Subject) -> list[str]:
    fits = [
        f"{fit.strategy} {fit.serial_fraction:.1%} ({fit.serial_fraction_low:.1%} to {fit.serial_fraction_high:.1%})"
        for fit in subject.frames.amdahl.itertuples()
    ]
    return [f"Serial fraction by Amdahl's fit: {', '.join(fits)}."] if fits else []


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    columns = ["strategy", "workers", "speedup", "speedup_low", "speedup_high", "efficiency", "base"]
    headings = ["strategy", "workers", "speed-up, mean", "lowest", "highest", "parallel efficiency", "base"]
    return rows.assign(base=_bases(rows))[columns].set_axis(headings, axis="columns")


def _bases(rows: pd.DataFrame) -> list[str]:
    return [words.combination(row.base_strategy, row.base_workers) for row in rows.itertuples()]
