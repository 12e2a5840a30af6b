"""Results as tables."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from paceline.config import Target
from paceline.lab import words
from paceline.lab.analysis import num_tried
from paceline.lab.frames import Frames
from paceline.lab.reaching import first_reaching
from paceline.running.goodput import Goodput
from paceline.running.result import Result
from paceline.training import clock

_HEADINGS = ("to target, s", "speed-up", "samples/s", "cost, s")
_VIRTUAL_HEADINGS = ("to target,\nvirtual s", "virtual\nspeed-up", "samples/\nvirtual s", "virtual\ncost, s")


def of_study(frames: Frames) -> Table:
    """One row a strategy and number of workers: means over seeds, with the least and the greatest in brackets."""
    # Narrow enough for a terminal of 80 columns; a strategy with long options is what gives way.
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    has_target = bool((frames.trials["target"] != "").any())
    cells = _target_cells if has_target else _rate_cells
    metric = next((name for name in frames.trials["metric"] if name), "metric")
    is_virtual = frames.trials["engine"].iloc[0] == clock.VIRTUAL
    to_target, speedup, rate, cost = _VIRTUAL_HEADINGS if is_virtual else _HEADINGS
    own = (to_target, speedup, rate, cost) if has_target else (f"last {metric}", rate)
    for heading in ("strategy", "workers", "seeds", *own):
        is_strategy = heading == "strategy"
        table.add_column(heading, justify="left" if is_strategy else "right", no_wrap=not is_strategy, overflow="fold")
    for _, row in frames.summary.iterrows():
        shown = cells(row) if row["seeds"] else ["0", "failed" if row["failed"] else "-", *["-"] * (len(own) - 1)]
        table.add_row(row["strategy"], str(row["workers"]), *shown)
    return table


def _target_cells(row: Any) -> list[str]:
    return [
        f"{row['reached']}/{num_tried(row)}",
        _spread(row, "time_to_target_s", _short) if row["reached"] else "never",
        _spread(row, "speedup", words.ratio),
        f"{row['samples_per_s']:,.0f}",
        words.quantity(row["cost_s_to_target"]) if row["reached"] else "-",
    ]


def _rate_cells(row: Any) -> list[str]:
    return [
        str(row["seeds"]),
        _spread(row, "last_metric", words.quantity),
        _spread(row, "samples_per_s", lambda rate: f"{rate:,.0f}"),
    ]


def _short(value: float) -> str:
    """Two digits of what is small: three of each would leave a terminal of 80 columns no room for a strategy's name."""
    return f"{value:.2g}" if value < 0.1 else words.quantity(value)


def _spread(row: Any, quantity: str, say: Callable[[float], str]) -> str:
    mean, low, high = (row[f"{quantity}{bound}"] for bound in ("", "_low", "_high"))
    if math.isnan(mean):
        return "-"
    return say(mean) if say(low) == say(high) else f"{say(mean)} ({say(low)}-{say(high)})"


def _passed(result: Result, target: Target, hold: int | None) -> str:
    reaching = first_reaching(result.evaluations, target, hold)
    return f"{reaching.evaluation.time_s:.2f} {clock.unit(result.engine)}" if reaching is not None else "never"


def _goodput(result: Result) -> str | None:
    """The goodput of a run, and what the rest of its workers' time went into; none where nobody could die."""
    found = Goodput.of(
        result.events, worker_s=lambda: sum(s.compute_s + s.communication_s + s.waiting_s for s in result.steps)
    )
    if found is None:
        return None
    lost = {"regrouping": found.regrouping, "steps lost": found.steps, "starting": found.starting}
    known = [f"{name} {words.percent(part)}" for name, part in lost.items() if not math.isnan(part)]
    price = f"; hosts cost {words.quantity(found.cost)}" if found.cost > 0 else ""
    return f"{words.percent(found.goodput)} ({', '.join(known)}){price}"


def _trained_by(result: Result) -> str:
    if result.engine == "served":
        return f"{len(result.updates):,} updates of {result.num_clients:,} client(s)"
    return f"{result.manifest['num_workers']} worker(s)"


def summary(result: Result, passed: Sequence[Target] = (), *, hold: int | None = None) -> Table:
    """`passed` are targets on the way to the one that ended the run."""
    table = Table(show_header=False, box=None)
    shares = result.shares
    reached_s = result.time_to_target_s
    target = result.manifest.get("config", {}).get("target")
    never = f"never: wanted {Target(**target)}" if target is not None else None
    rows = {
        "strategy": f"{result.manifest['strategy']['name']}, {_trained_by(result)}",
        "iterations": f"{result.iteration:,} ({words.ITERATIONS[result.unit]})",
        "attack": ", ".join(result.manifest.get("config", {}).get("attacks", ())) or None,
        "training time": f"{result.training_time_s:.2f} {clock.unit(result.engine)}",
        f"samples/{clock.unit(result.engine)}": f"{result.samples_per_s:,.0f}" if result.steps else None,
        **{name: f"{value:.4g}" for name, value in result.metrics.items()},
        "time to target": f"{reached_s:.2f} {clock.unit(result.engine)}" if reached_s is not None else never,
        **{f"time to {target}": _passed(result, target, hold) for target in passed},
        "time spent": ", ".join(f"{name} {share:.0%}" for name, share in shares.items()) if result.steps else None,
        "goodput": _goodput(result),
        "results": str(result.directory),
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, value)
    return table
