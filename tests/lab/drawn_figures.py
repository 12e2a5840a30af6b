"""The figures that are drawn of frames, and their traces."""

from __future__ import annotations

import plotly.graph_objects as go

from paceline.lab.figures import Chart, Subject, figures
from paceline.lab.frames import Frames


def typical_of(plot: go.Figure) -> list[go.Scatter]:
    return [trace for trace in plot.data if trace.error_x.array is not None]


def drawn_of(frames: Frames) -> dict[str, dict[str, Chart]]:
    """By figure, then by what the chart is of; nothing may have failed."""
    drawn = figures([Subject("example", "train.py", frames)])
    assert [figure.failure for figure in drawn if figure.failure] == []
    found = {figure.key: {row[0].key: row[0] for row in figure.rows if row[0]} for figure in drawn}
    assert sum(map(len, found.values())) == sum(bool(row[0]) for figure in drawn for row in figure.rows)
    return found


def trace_of(plot: go.Figure, name: str) -> go.Scatter:
    return next(trace for trace in plot.data if trace.name == name)
