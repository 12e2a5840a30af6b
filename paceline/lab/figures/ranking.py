"""What reaching the target takes, best first: time, and cost in worker-seconds."""

import pandas as pd
import plotly.graph_objects as go

from paceline.lab.analysis import num_tried
from paceline.lab.figures.chart import Chart, Subject, canvas, pattern, reached_in_part, whiskers
from paceline.lab.figures.style import INK, plain

_ROW_PX, _FRAME_PX = 26, 80


def time_to_target(subject: Subject) -> list[Chart]:
    return _ranking(subject, "time_to_target_s", subject.seconds("Time to target"))


def cost_to_target(subject: Subject) -> list[Chart]:
    unit = f"{'virtual ' if subject.is_virtual else ''}worker-seconds"
    return _ranking(subject, "worker_s_to_target", f"Cost to target ({unit})")


def _ranking(subject: Subject, quantity: str, x_title: str) -> list[Chart]:
    """Horizontal bars, the best on top; below them, without a bar, what never reached the target."""
    summary = subject.frames.summary
    if subject.target is None or summary.empty:
        return []
    ordered = summary.sort_values(quantity, na_position="last").assign(
        row=lambda frame: [plain(f"{s} × {n}") for s, n in zip(frame["strategy"], frame["workers"], strict=True)]
    )
    plot = canvas(x_title=x_title, y_title="Strategy × workers", height_px=_FRAME_PX + _ROW_PX * len(ordered))
    reached = ordered[ordered[quantity].notna()]
    for strategy in subject.strategies:
        rows = reached[reached["strategy"] == strategy]
        if len(rows):
            _bars(plot, subject, strategy, rows, quantity)
    never = ordered[ordered[quantity].isna()]
    for row in never.itertuples():
        plot.add_annotation(
            x=0,
            y=row.row,
            text="✕ " + _why_none(row.seeds),
            xanchor="left",
            xshift=6,
            showarrow=False,
            font={"size": 12, "color": INK},
        )
    plot.update_yaxes(
        categoryorder="array", categoryarray=ordered["row"].tolist()[::-1], ticks="", range=[-0.6, len(ordered) - 0.4]
    )
    plot.update_xaxes(rangemode="tozero")
    plot.update_layout(barmode="overlay", bargap=0.25, showlegend=False)
    words = [f"{row.strategy} at {row.workers} workers: {getattr(row, quantity):.4g}" for row in reached.itertuples()]
    words += [f"{row.strategy} at {row.workers} workers: {_why_none(row.seeds)}" for row in never.itertuples()]
    alternative = f"{x_title}, best first. {'; '.join(words)}."
    return [Chart("", "", plot, alternative, _table(ordered, quantity, x_title), tuple(reached_in_part(summary)))]


def _bars(plot: go.Figure, subject: Subject, strategy: str, rows: pd.DataFrame, quantity: str) -> None:
    style = subject.strategy_styles[strategy]
    plot.add_trace(
        go.Bar(
            x=rows[quantity].tolist(),
            y=rows["row"].tolist(),
            orientation="h",
            name=plain(strategy),
            marker={
                "color": style.colour,
                "line": {"color": style.colour, "width": 1},
                "pattern": pattern(style.pattern),
            },
            error_x=whiskers(rows, quantity, INK),
        )
    )


def _why_none(num_finished: int) -> str:
    return "never reached" if num_finished else "no run finished"


def _table(ordered: pd.DataFrame, quantity: str, x_title: str) -> pd.DataFrame:
    table = ordered.assign(tried=[num_tried(row) for _, row in ordered.iterrows()])
    table = table[["strategy", "workers", quantity, f"{quantity}_low", f"{quantity}_high", "reached", "tried"]]
    headings = ["strategy", "workers", f"{x_title}, mean", "lowest seed", "highest seed", "seeds that reached", "seeds"]
    table = table.astype(dict.fromkeys((quantity, f"{quantity}_low", f"{quantity}_high"), object))
    lacking = ordered[quantity].isna()
    table.loc[lacking, quantity] = [_why_none(num_finished) for num_finished in ordered.loc[lacking, "seeds"]]
    return table.set_axis(headings, axis="columns")
