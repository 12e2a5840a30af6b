"""Results as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from paceline.result import Result


def comparison(results: Sequence[Result], *, metric: str, title: str) -> Table:
    """One row a run. Speed-up is the time to the target of `single`, or of one worker, over the run's own."""
    # Without padding it is narrow enough for a terminal of 80 columns; a long metric's name is what gives way.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    headings = ("strategy", "workers", metric, "to target", "samples/s", "speed-up", "compute", "comm.", "waiting")
    for heading in headings:
        table.add_column(
            heading,
            justify="left" if heading == "strategy" else "right",
            no_wrap=heading != metric,
            overflow="ellipsis",
        )
    for result in results:
        table.add_row(*_row(result, _baseline_s(results, result), metric))
    return table


def _baseline_s(results: Sequence[Result], of: Result) -> float | None:
    """The time that one worker took under the same strategy; where that was not run, under `single`."""
    for wanted in (of.manifest["strategy"]["name"], "single"):
        for result in results:
            if result.manifest["strategy"]["name"] == wanted and result.manifest["num_workers"] == 1:
                return result.time_to_target_s
    return None


def _row(result: Result, baseline_s: float | None, metric: str) -> list[str]:
    reached_s = result.time_to_target_s
    shares = result.shares
    return [
        result.manifest["strategy"]["name"],
        str(result.manifest["num_workers"]),
        f"{result.metrics[metric]:.1%}" if metric in result.metrics else "-",
        f"{reached_s:.2f} s" if reached_s is not None else "never",
        f"{result.samples_per_s:,.0f}",
        f"{baseline_s / reached_s:.2f}" if baseline_s and reached_s else "-",
        *(f"{shares[name]:.0%}" for name in ("compute", "communication", "waiting")),
    ]


def summary(result: Result) -> Table:
    """One run, fact by fact."""
    table = Table(show_header=False, box=None)
    shares = result.shares
    reached_s = result.time_to_target_s
    rows = {
        "strategy": f"{result.manifest['strategy']['name']}, {result.manifest['num_workers']} worker(s)",
        "steps": f"{result.iteration:,}",
        "training time": f"{result.training_time_s:.2f} s",
        "samples/s": f"{result.samples_per_s:,.0f}",
        **{name: f"{value:.4g}" for name, value in result.metrics.items()},
        "time to target": f"{reached_s:.2f} s" if reached_s is not None else None,
        "time spent": ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
        "results": str(result.directory),
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, value)
    return table
