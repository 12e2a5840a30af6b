"""How old gradients are when they are applied."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from paceline.lab import words
from paceline.lab.figures.chart import Chart, Subject, canvas, curve
from paceline.lab.figures.curves import Floats
from paceline.lab.figures.style import Style

_HEIGHT_PX = 300
_MAX_BINS = 200
_SHOWN_SHARE = 0.99  # of the gradients, where staleness goes beyond what as many bins as that can show one by one


def staleness(subject: Subject) -> list[Chart]:
    """A histogram a strategy that has stale gradients, one outline a number of workers, all seeds together."""
    charts = []
    for strategy in subject.strategies:
        rows = subject.of_finished(subject.frames.staleness, strategy=strategy)
        if len(rows) and rows["staleness"].max() > 0:
            charts.append(_chart(subject, strategy, rows))
    return charts


@dataclass(frozen=True)
class _Bins:
    """Whole numbers from 0 to `last`, `width` to a bin."""

    width: int
    num: int

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "_Bins":
        """One number a bin if that is possible; a few gradients that are far staler than all others are left out."""
        ordered = rows.sort_values("staleness")
        shown = ordered["count"].cumsum() >= _SHOWN_SHARE * ordered["count"].sum()
        last = min(int(ordered["staleness"].iloc[-1]), max(int(ordered.loc[shown, "staleness"].iloc[0]), _MAX_BINS - 1))
        width = last // _MAX_BINS + 1
        return cls(width, last // width + 1)

    @property
    def last(self) -> int:
        return self.num * self.width - 1

    @property
    def centres(self) -> list[float]:
        return [index * self.width + (self.width - 1) / 2 for index in range(self.num)]

    def fill(self, rows: pd.DataFrame) -> Floats:
        within = rows[rows["staleness"] <= self.last]
        counts = np.bincount(within["staleness"] // self.width, weights=within["count"], minlength=self.num)
        return counts.astype(np.float64)

    def name(self, index: int) -> str:
        first = index * self.width
        return str(first) if self.width == 1 else f"{first}–{first + self.width - 1}"


def _chart(subject: Subject, strategy: str, rows: pd.DataFrame) -> Chart:
    bins = _Bins.of(rows)
    plot = canvas(
        x_title="Staleness (updates since the worker read)", y_title="Share of the gradients (%)", height_px=_HEIGHT_PX
    )
    said, notes, table = [], [], []
    styles = subject.worker_styles(strategy)
    for count, own in rows.groupby("workers"):
        total, worst = int(own["count"].sum()), int(own["staleness"].max())
        filled = bins.fill(own)
        _outline(plot, styles[count], count, bins, filled / total)
        mean = float((own["staleness"] * own["count"]).sum() / total)
        said.append(f"{words.workers(count)}: mean {mean:.2g}, at most {worst}")
        table += [(count, bins.name(index), int(num)) for index, num in enumerate(filled) if num]
        beyond = total - int(filled.sum())
        if beyond:
            table.append((count, f"more than {bins.last}", beyond))
            notes.append(
                f"Not shown with {words.workers(count)}: {beyond:,} of {total:,} gradients, staler than {bins.last:,}, "
                f"up to {worst:,}."
            )
    plot.update_yaxes(tickformat=".0%", hoverformat=".1%", rangemode="tozero")
    plot.update_xaxes(range=[-0.75 * bins.width, bins.last + 0.75 * bins.width])
    frame = pd.DataFrame(table, columns=["workers", "staleness", "gradients"])
    return Chart(strategy, strategy, plot, f"{strategy}, staleness. {'; '.join(said)}.", frame, tuple(notes))


def _outline(plot: go.Figure, style: Style, count: int, bins: _Bins, share: Floats) -> None:
    centres = bins.centres
    # A zero at each end closes the outline; bins lie around their centres.
    x, y = [centres[0] - bins.width, *centres, centres[-1] + bins.width], [0.0, *share.tolist(), 0.0]
    shape, marks = {"shape": "hvh"}, {"maxdisplayed": 12}
    plot.add_trace(curve(words.workers(count), style, x=x, y=y, line=shape, marker=marks))
