"""What reaching the target takes, best first: time, and cost in seconds of workers and servers."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from paceline.lab.analysis import num_tried
from paceline.lab.comparing import COST, TIME
from paceline.lab.figures import logarithmic
from paceline.lab.figures.chart import Chart, Subject, canvas, reached_in_part
from paceline.lab.figures.style import FAINT, INK, plain

_ROW_PX, _FRAME_PX = 24, 80
_LOGARITHMIC = 8.0  # times the least: from there on, what lies close to it could not be told apart


def time_to_target(subject: Subject) -> list[Chart]:
    return _ranking(subject, TIME, subject.seconds("Time to target"))


def cost_to_target(subject: Subject) -> list[Chart]:
    unit = f"{'virtual ' if subject.is_virtual else ''}process-seconds"
    return _ranking(subject, COST, f"Cost to target ({unit})")


def _ranking(subject: Subject, quantity: str, x_title: str) -> list[Chart]:
    """A row a combination, the best on top: every run, what a run typically takes, and by how much chance explains that
    it differs from the best. Below them what never reached the target."""
    summary = subject.frames.summary
    if subject.target is None or summary.empty:
        return []
    rows = _rows(subject, quantity)
    runs = _runs(subject, quantity).merge(rows[["strategy", "workers", "row"]])
    plot = canvas(x_title=x_title, y_title="Strategy × workers", height_px=_FRAME_PX + _ROW_PX * len(rows))
    reached = rows[rows["typical"].notna()]
    for strategy in subject.strategies:
        _draw_runs(plot, subject, strategy, runs[runs["strategy"] == strategy])
        _draw_typical(plot, subject, strategy, reached[reached["strategy"] == strategy])
    never = rows[rows["typical"].isna()]
    for row in never.itertuples():
        label: dict[str, Any] = {"xref": "paper", "xanchor": "left", "xshift": 6, "showarrow": False}
        plot.add_annotation(x=0, y=row.row, text="✕ " + _why_none(row.seeds), font={"size": 12, "color": INK}, **label)
    plot.update_yaxes(
        categoryorder="array", categoryarray=rows["row"].tolist()[::-1], ticks="", range=[-0.6, len(rows) - 0.4]
    )
    if len(reached):
        plot.add_vline(x=float(reached["typical"].iloc[0]), line={"color": FAINT, "width": 1})
        shown = runs.loc[runs["strategy"].notna() & (runs["value"] > 0), "value"]
        if len(shown) and shown.max() > _LOGARITHMIC * shown.min():
            bars = reached[["low", "high"]].stack()
            plot.update_xaxes(logarithmic.axis(logarithmic.span_of([*shown, *bars[bars > 0]])))
    plot.update_layout(showlegend=False)
    words = [
        f"{'≈ ' if row.is_tied else ''}{row.strategy} at {row.workers} workers: {row.typical:.4g}"
        for row in reached.itertuples()
    ]
    words += [f"{row.strategy} at {row.workers} workers: {_why_none(row.seeds)}" for row in never.itertuples()]
    alternative = f"{x_title}, best first. {'; '.join(words)}."
    notes = (*reached_in_part(summary), *_censored(runs))
    return [Chart("", "", plot, alternative, _table(rows, quantity, x_title), notes)]


def _rows(subject: Subject, quantity: str) -> pd.DataFrame:
    """The summary beside what was found in comparing, the best first."""
    compared = subject.frames.compared(quantity).reset_index(drop=True)
    columns = ["strategy", "workers", "typical", "low", "high", "may_be_best"]
    rows = subject.frames.summary.merge(compared[columns], how="left", on=["strategy", "workers"])
    rows["may_be_best"] = rows["may_be_best"].eq(True)
    is_tied = rows["may_be_best"] & (rows["may_be_best"].sum() > 1)
    labels = [
        plain(f"{'≈ ' if tied else ''}{s} × {n}")
        for s, n, tied in zip(rows["strategy"], rows["workers"], is_tied, strict=True)
    ]
    return rows.assign(is_tied=is_tied, row=labels).sort_values("typical", na_position="last", kind="stable")


def _runs(subject: Subject, quantity: str) -> pd.DataFrame:
    """Every run that trained to its end: `value`, until it arrived or ended."""
    finished = subject.finished
    processes = finished["workers"] + finished["servers"] if quantity == COST else 1
    value = finished[quantity].fillna(processes * finished["training_time_s"])
    return finished.assign(value=value)[["strategy", "workers", "seed", "reached", "ended_by", "value"]]


def _draw_runs(plot: go.Figure, subject: Subject, strategy: str, runs: pd.DataFrame) -> None:
    colour = subject.strategy_styles[strategy].colour
    for has_arrived, symbol, what in (
        (True, "circle", "run"),
        (False, "triangle-right-open", "ended before it arrived"),
    ):
        own = runs[runs["reached"] == has_arrived]
        if len(own):
            marker = {"color": colour, "size": 6 if has_arrived else 9, "symbol": symbol, "opacity": 0.55}
            text = [f"seed {seed}, {what}" for seed in own["seed"]]
            points = {"x": own["value"].tolist(), "y": own["row"].tolist(), "text": text}
            plot.add_trace(go.Scatter(mode="markers", name=what, marker=marker, **points))


def _draw_typical(plot: go.Figure, subject: Subject, strategy: str, rows: pd.DataFrame) -> None:
    """Hollow where the combination is not among the best."""
    if rows.empty:
        return
    style = subject.strategy_styles[strategy]
    symbols = [style.marker.removesuffix("-open") + ("" if best else "-open") for best in rows["may_be_best"]]
    errors = {
        "type": "data",
        "symmetric": False,
        "array": (rows["high"] - rows["typical"]).tolist(),
        "arrayminus": (rows["typical"] - rows["low"]).tolist(),
        "color": style.colour,
        "thickness": 2,
        "width": 4,
    }
    plot.add_trace(
        go.Scatter(
            x=rows["typical"].tolist(),
            y=rows["row"].tolist(),
            mode="markers",
            name=plain(strategy),
            marker={"color": style.colour, "size": 12, "symbol": symbols, "line": {"width": 2, "color": style.colour}},
            error_x=errors,
        )
    )


def _why_none(num_finished: int) -> str:
    return "never reached" if num_finished else "no run finished"


def _censored(runs: pd.DataFrame) -> list[str]:
    """What ended the runs that never arrived."""
    ended = runs[~runs["reached"]]
    return [
        f"{strategy} × {workers}, seed{'s' * (len(own) > 1)} {', '.join(map(str, own['seed']))}: not reached when "
        f"{'the script ended' if by in ('script', '') else f'--{by} ended it'}."
        for (strategy, workers, by), own in ended.groupby(["strategy", "workers", "ended_by"], sort=False)
    ]


def _table(rows: pd.DataFrame, quantity: str, x_title: str) -> pd.DataFrame:
    numbers = ["typical", "low", "high", quantity, f"{quantity}_low", f"{quantity}_high"]
    table = rows.assign(tried=[num_tried(row) for _, row in rows.iterrows()], first=rows["may_be_best"].map(_YES))
    table = table[["strategy", "workers", *numbers, "first", "reached", "tried"]]
    headings = [x_title, "from, by chance", "to, by chance", "mean", "lowest seed", "highest seed"]
    headings = ["strategy", "workers", *headings, "may be best", "seeds that reached", "seeds"]
    table = table.astype(dict.fromkeys(numbers, object))
    lacking = rows["typical"].isna()
    table.loc[lacking, "typical"] = [_why_none(num_finished) for num_finished in rows.loc[lacking, "seeds"]]
    return table.set_axis(headings, axis="columns")


_YES = {True: "yes", False: "no"}
