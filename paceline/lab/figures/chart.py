"""What a figure consists of: charts, each with a text alternative and the numbers that it draws."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from paceline.config import Target
from paceline.lab import words
from paceline.lab.analysis import num_tried
from paceline.lab.figures.style import FAINT, GRID, INK, Style, plain, strategy_styles, worker_styles
from paceline.lab.frames import Frames
from paceline.training import clock

HEIGHT_PX = 340
_FONT_SIZE, _TICK_SIZE = 13, 12
_ROOM = 0.05  # of the span, left free beyond the data


@dataclass(frozen=True, eq=False)
class Chart:
    key: str
    """Says which charts of two studies belong side by side: a strategy, or empty."""
    title: str
    plot: go.Figure
    alternative: str
    """What the plot shows, in words, for those who cannot see it."""
    table: pd.DataFrame
    """The numbers drawn, with headings that name units."""
    notes: tuple[str, ...] = ()
    """What the plot cannot show, such as runs that never reached the target."""


@dataclass(frozen=True, eq=False)
class Subject:
    """One script of one study, and everything that its figures have in common."""

    study: str
    script: str
    frames: Frames
    all_strategies: tuple[str, ...] = field(default=())
    """The strategies of all studies on the page, so that a strategy looks the same in each."""
    all_counts: tuple[int, ...] = field(default=())

    @cached_property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(self.frames.trials["strategy"]))

    @cached_property
    def counts(self) -> list[int]:
        return sorted({int(count) for count in self.frames.trials["workers"]})

    @cached_property
    def strategy_styles(self) -> dict[str, Style]:
        return strategy_styles(self.all_strategies or self.strategies)

    def worker_styles(self, strategy: str) -> dict[int, Style]:
        """How a strategy's numbers of workers look: in its colour."""
        return worker_styles(self.all_counts or self.counts, colour=self.strategy_styles[strategy].colour)

    @cached_property
    def finished(self) -> pd.DataFrame:
        trials = self.frames.trials
        return trials[trials["status"] == "finished"]

    @cached_property
    def reached(self) -> frozenset[str]:
        """The trials that ended when they reached the target."""
        return frozenset(self.finished.loc[self.finished["ended_by"] == "target", "trial"])

    @cached_property
    def target(self) -> Target | None:
        texts = [str(text) for text in self.frames.trials["target"].dropna() if str(text)]
        return Target.parse(texts[0]) if texts else None

    @cached_property
    def metric(self) -> str | None:
        """The metric that figures show: the target's, else the first that was evaluated."""
        if self.target is not None:
            return self.target.metric
        names = self.frames.trials["metric"]
        names = names[names != ""]
        return str(names.iloc[0]) if len(names) else None

    @cached_property
    def engine(self) -> str:
        return str(self.frames.trials["engine"].iloc[0])

    @property
    def is_virtual(self) -> bool:
        return self.engine == clock.VIRTUAL

    @cached_property
    def cluster(self) -> str:
        """Name of the simulated cluster; empty: a real one."""
        return str(self.frames.trials["cluster"].iloc[0])

    @property
    def unit(self) -> str:
        return clock.unit(self.engine)

    def seconds(self, what: str) -> str:
        return f"{what} ({self.unit})"

    @property
    def time_title(self) -> str:
        return self.seconds("Training time")

    def unit_of(self, strategy: str) -> str:
        trials = self.frames.trials
        return str(trials.loc[trials["strategy"] == strategy, "unit"].iloc[0])

    def is_synchronous(self, strategy: str) -> bool:
        return self.unit_of(strategy) != "gradient"

    def counts_of(self, strategy: str) -> list[int]:
        """Worker counts at which the strategy has a finished trial."""
        return sorted({int(n) for n in self.finished.loc[self.finished["strategy"] == strategy, "workers"]})

    def of_finished(self, frame: pd.DataFrame, **columns: object) -> pd.DataFrame:
        """Rows of finished trials with these values in these columns."""
        rows = frame[frame["trial"].isin(self.finished["trial"])]
        for name, value in columns.items():
            rows = rows[rows[name] == value]
        return rows


def canvas(*, x_title: str, y_title: str, height_px: int = HEIGHT_PX) -> go.Figure:
    """An empty plot in the page's style."""
    axis: dict[str, Any] = {
        "gridcolor": GRID,
        "linecolor": FAINT,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": FAINT,
        "automargin": True,
        "title": {"standoff": 10, "font": {"size": _FONT_SIZE}},
        "tickfont": {"size": _TICK_SIZE},
    }
    plot = go.Figure()
    plot.update_layout(
        template="none",
        height=height_px,
        margin={"l": 56, "r": 16, "t": 12, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": _FONT_SIZE, "color": INK},
        hoverlabel={"font": {"family": "system-ui, sans-serif"}},
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "itemsizing": "trace",
            "font": {"size": _TICK_SIZE},
        },
        showlegend=True,
        xaxis=axis,
        yaxis=axis,
    )
    plot.update_xaxes(title_text=x_title)
    plot.update_yaxes(title_text=y_title)
    return plot


def curve(name: str, style: Style, *, width: float = 2, size: int = 7, **settings: Any) -> go.Scatter:
    """A line with marks. `settings` are of the trace; `line` and `marker` among them add to what they are by
    default."""
    line = {"color": style.colour, "dash": style.dash, "width": width, **settings.pop("line", {})}
    marker = {"symbol": style.marker, "size": size, "color": style.colour, **settings.pop("marker", {})}
    given = {
        "mode": "lines+markers",
        "opacity": style.opacity,
        "name": plain(name),
        "legendgroup": plain(name),
        **settings,
    }
    return go.Scatter(line=line, marker=marker, **given)


def pattern(shape: str) -> dict[str, Any]:
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "var(--page)", "size": 6}


def whiskers(
    rows: pd.DataFrame, quantity: str, colour: str, *, thickness: float = 1.2, width: int = 3
) -> dict[str, Any]:
    """Error bars from the lowest to the highest seed."""
    return {
        "type": "data",
        "symmetric": False,
        "array": (rows[f"{quantity}_high"] - rows[quantity]).tolist(),
        "arrayminus": (rows[quantity] - rows[f"{quantity}_low"]).tolist(),
        "color": colour,
        "thickness": thickness,
        "width": width,
    }


def ideal(plot: go.Figure, workers: int, value: float, *, first: float = 1.0) -> None:
    """A faint straight line from what one worker does to as many times that for so many."""
    line = {"color": FAINT, "width": 1, "dash": "4px 4px"}
    plot.add_trace(go.Scatter(x=[1, workers], y=[first, value], mode="lines", name="ideal", line=line))


def share_ranges(charts: Iterable[Chart], *, from_zero: bool) -> None:
    """Give axes with the same title the same range, so that a figure's charts can be compared by eye.

    Those with another title count something else: gradients are no updates, and virtual seconds no real ones. The
    horizontal axis always starts at zero.
    """
    across: dict[str, list[float]] = {}
    up: dict[str, list[float]] = {}
    plots = [chart.plot for chart in charts]
    for plot in plots:
        across.setdefault(plot.layout.xaxis.title.text, []).extend(_numbers(plot, "x"))
        up.setdefault(plot.layout.yaxis.title.text, []).extend(_numbers(plot, "y"))
    for plot in plots:
        plot.update_xaxes(range=_span(across[plot.layout.xaxis.title.text], from_zero=True))
        plot.update_yaxes(range=_span(up[plot.layout.yaxis.title.text], from_zero=from_zero))


def _numbers(plot: go.Figure, axis: str) -> list[float]:
    """All that is drawn along `x` or `y`, the target's line included."""
    values = [float(value) for trace in plot.data for value in getattr(trace, axis) or ()]
    values += [shape.y0 for shape in plot.layout.shapes if axis == "y"]
    return [value for value in values if math.isfinite(value)]


def _span(values: Sequence[float], *, from_zero: bool) -> list[float] | None:
    if not values:
        return None
    low, high = min(values), max(values)
    if from_zero:
        low = min(low, 0.0)
    room = _ROOM * ((high - low) or abs(high) or 1.0)
    return [low if from_zero else low - room, high + room]


def say_cluster(plot: go.Figure, cluster: str) -> None:
    """Under the horizontal axis, so that a picture of the plot alone cannot be taken for a measurement."""
    said = f'<span style="font-size: {_TICK_SIZE}px">simulated cluster {plain(cluster)}</span>'
    plot.update_xaxes(title_text=f"{plot.layout.xaxis.title.text}<br>{said}")


def draw_target(plot: go.Figure, target: Target) -> None:
    plot.add_hline(
        y=target.value,
        line={"color": INK, "width": 1, "dash": "2px 2px"},
        annotation={
            "text": "target",
            "xanchor": "left",  # where curves that rise to a target, or fall to it, are not yet
            "yanchor": "bottom" if target.rising else "top",
            "showarrow": False,
            "font": {"size": 11, "color": INK},
        },
        annotation_position="top left" if target.rising else "bottom left",
        name="target",
    )


def reached_in_part(summary: pd.DataFrame) -> list[str]:
    """Sentences on means that leave out seeds which never reached the target, be it because they failed."""
    rows = [row for _, row in summary.iterrows() if 0 < row["reached"] < num_tried(row)]
    return [
        f"{words.combination(row['strategy'], row['workers'])}: the mean is of the {row['reached']} of "
        f"{num_tried(row)} seeds that reached."
        for row in rows
    ]


def is_percent(metric: str, values: pd.Series) -> bool:
    """Whether a metric is a share of one that people speak of in percent."""
    names = ("accuracy", "acc", "precision", "recall", "f1", "top1", "top5")
    return any(name in metric.lower() for name in names) and bool(values.dropna().between(0, 1).all())
