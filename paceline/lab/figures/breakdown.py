"""Where time goes: computing, computing while gradients move behind it (overlapped), communicating, waiting."""

import pandas as pd
import plotly.graph_objects as go

from paceline.lab.figures.chart import Chart, Subject, canvas, pattern

_HEIGHT_PX = 320
# Column, name, colour and pattern of each part, from the axis outward; the parts add up to the whole time.
_PARTS = (
    ("alone_s", "compute", "var(--part-1)", ""),
    ("hidden_s", "overlapped", "var(--part-2)", "/"),
    ("communication_s", "communication", "var(--part-3)", "x"),
    ("waiting_s", "waiting", "var(--part-4)", "."),
)


def shares(subject: Subject) -> list[Chart]:
    """The parts of all workers' time against the number of workers, a chart a strategy."""
    charts = []
    for strategy, workers in _by_strategy(subject):
        parts = workers.groupby("workers")[[column for column, *_ in _PARTS]].sum()
        parts = parts.div(parts.sum(axis="columns"), axis="index")
        labels = [str(count) for count in parts.index]
        plot = canvas(
            x_title="Workers (number)",
            y_title=f"Share of the {'virtual ' if subject.is_virtual else ''}time (%)",
            height_px=_HEIGHT_PX,
        )
        _stack(plot, labels, parts)
        plot.update_yaxes(range=[0, 1], tickformat=".0%", hoverformat=".1%")
        words = "; ".join(f"{count} workers: {_in_words(row)}" for count, row in parts.iterrows())
        table = parts.reset_index().set_axis(["workers", *(f"{name}, share" for _, name, *_ in _PARTS)], axis="columns")
        charts.append(Chart(strategy, strategy, plot, f"{strategy}, shares of the workers' time. {words}.", table))
    return charts


def per_worker(subject: Subject) -> list[Chart]:
    """Seconds of each worker at the strategy's largest number of workers: a straggler shows in the others' waiting."""
    charts = []
    for strategy, workers in _by_strategy(subject):
        columns = [column for column, *_ in _PARTS]
        means = workers.groupby(["workers", "worker"])[columns].mean()
        count = max(subject.counts_of(strategy))
        if count < 2 or count not in means.index:
            continue
        parts = means.loc[count]
        plot = canvas(x_title="Worker (rank)", y_title=subject.seconds("Time, mean over seeds"), height_px=_HEIGHT_PX)
        _stack(plot, [str(rank) for rank in parts.index], parts)
        title = f"{strategy}, {count} workers"
        words = "; ".join(f"worker {rank}: {_in_words(row / row.sum())}" for rank, row in parts.iterrows())
        headings = ["workers", "worker", *(f"{name} ({subject.unit})" for _, name, *_ in _PARTS)]
        table = means.reset_index().set_axis(headings, axis="columns")
        charts.append(Chart(strategy, title, plot, f"{title}: time of each worker. {words}.", table))
    return charts


def _by_strategy(subject: Subject) -> list[tuple[str, pd.DataFrame]]:
    found = []
    for strategy in subject.strategies:
        workers = subject.of_finished(subject.frames.workers, strategy=strategy)
        if len(workers):
            # hidden_s is the part of compute_s in which gradients moved.
            alone_s = (workers["compute_s"] - workers["hidden_s"]).clip(lower=0.0)
            found.append((strategy, workers.assign(alone_s=alone_s)))
    return found


def _stack(plot: go.Figure, labels: list[str], parts: pd.DataFrame) -> None:
    for column, name, colour, shape in _PARTS:
        plot.add_trace(
            go.Bar(
                x=labels,
                y=parts[column].tolist(),
                name=name,
                marker={"color": colour, "line": {"color": "var(--page)", "width": 1}, "pattern": pattern(shape)},
            )
        )
    plot.update_layout(barmode="stack", bargap=0.3, legend_traceorder="normal")
    plot.update_xaxes(type="category")


def _in_words(shares_of_parts: pd.Series) -> str:
    return ", ".join(f"{name} {shares_of_parts[column]:.0%}" for column, name, *_ in _PARTS)
