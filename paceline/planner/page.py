"""A plan as one HTML file that needs nothing else, with the look of the lab's report."""

import json
import math
from typing import Any

from paceline.lab import html_page, words
from paceline.lab.html_page import chart_view
from paceline.planner import wording
from paceline.planner.figures import charts
from paceline.planner.search import Plan, Point


def render(plan: Plan, *, script: str, cluster: str) -> str:
    """The page as HTML. Names from outside are shown as text, never taken as markup."""
    drawn = charts(plan)
    plots = {chart.key: json.loads(chart.plot.to_json()) for chart in drawn}
    context = {
        "script": script,
        "cluster": cluster,
        "about": plan.cluster.about,
        "answer": wording.answer(plan),
        "headings": _HEADINGS,
        "rows": [_row(plan, point) for point in plan.best_of_each],
        "charts": [{"id": chart.key, "title": chart.title, **chart_view(chart)} for chart in drawn],
        "link_rows": [_link_row(point) for point in plan.best_of_each if point.prediction.link_bytes],
        "facts": _facts(plan),
    }
    return html_page.render("plan.html.jinja", package="paceline.planner", plots=plots, context=context)


_HEADINGS = (
    "strategy", "workers", "step, ms", "compute, ms", "waiting, ms", "exchange, ms", "hidden, ms", "samples/s",
    "efficiency", "busiest link full", "what binds",
)  # fmt: skip


def _row(plan: Plan, point: Point) -> dict[str, Any]:
    found = point.prediction
    times_s = (found.step_s, found.compute_s, found.waiting_s, found.exchange_s, found.hidden_s)
    numbers = [words.quantity(time_s * 1e3) for time_s in times_s]
    shares = [words.percent(found.efficiency), words.percent(found.utilisation)]
    cells = [point.label, str(found.workers), *numbers, words.quantity(found.samples_per_s), *shares, found.binding]
    return {"cells": cells, "is_best": point is plan.best}


def _link_row(point: Point) -> dict[str, Any]:
    found = point.prediction
    moved = [f"{kind} {words.quantity(num_bytes / 1e6)} MB" for kind, num_bytes in found.link_bytes.items()]
    return {"name": f"{point.label} on {words.workers(found.workers)}", "value": "; ".join(moved)}


def _facts(plan: Plan) -> dict[str, str]:
    work = plan.work
    facts = {
        "Parameters": f"{work.parameter_bytes:,} bytes in {len(work.tensor_bytes)} tensors",
        "Batch": f"{work.samples} samples a worker and step",
        "Global batch": f"{plan.target_batch:,} samples, divided among workers" if plan.target_batch else "",
        "Forward pass": f"{words.quantity(work.forward_flop / 1e9)} Gflop" if work.forward_flop else "",
        "Optimizer's state": f"{work.state_bytes:,.0f} bytes",
        "Gradient noise scale": _noise_fact(plan.noise.samples) if plan.noise else "",
        "Combinations": f"{len(plan.points)}",
    }
    return {name: value for name, value in facts.items() if value}


def _noise_fact(samples: float) -> str:
    return f"{words.quantity(samples)} samples" if math.isfinite(samples) else "more than was measured"
