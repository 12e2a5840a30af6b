"""The cells that prediction.py is asked about: which run each is, what came of it, and what is promised of all."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers.exchange import gradient_bytes

from paceline.running.result import Result

HERE = Path(__file__).parent
SLEEP_S = {"resnet18": 0.1, "convnet": 0.02}
BATCH_SIZE = {"convnet": 100, "resnet18": 4}
NUM_WARMUP = {"convnet": 10, "resnet18": 2}  # the first ones meet a link whose rate has just changed
MAX_STEPS = {"convnet": 40, "resnet18": 6}
STEPS_BUDGET_S = 8.0
"""A run times fewer steps than MAX_STEPS where these would take longer, but one at least."""
ASYNCHRONOUS_TIMES = 4
"""As many steps, and as long, of workers that do not wait for each other: where they meet is chance."""
LEAST_ASYNCHRONOUS_STEPS = 6
"""Of a step of 13 s, a worker that was badly served took none within five of them."""
LEAST_STEP_S = 5e-3
"""No worker takes more steps than so long ones before its time is over."""
FITTED_HOSTS, FITTED_MBIT = (2, 4, 8), (100.0, 1000.0)
"""Of the documented grid, in sight of which constants were chosen."""
HELD_OUT_HOSTS, HELD_OUT_MBIT = (3, 6), (250.0, 600.0)
MEDIAN_BOUND, WORST_BOUND = 0.03, 0.10
"""Of the errors' absolute values, on cells that are held out."""


@dataclass(frozen=True)
class Cell:
    """One run to predict."""

    rate_mbit: float
    model: str
    workload: str
    num_hosts: int
    strategy: str
    num_servers: int

    @property
    def probe(self) -> str:
        """What its cluster is probed with."""
        return f"{self.rate_mbit:g} {self.model} {self.workload}"

    @property
    def label(self) -> str:
        servers = f", {self.num_servers} server(s)" if self.num_servers else ""
        return f"{self.probe}, {self.num_hosts} hosts, {self.strategy}{servers}"

    @property
    def is_held_out(self) -> bool:
        return self.num_hosts not in FITTED_HOSTS and self.rate_mbit not in FITTED_MBIT

    @property
    def link_s(self) -> float:
        """A step as the busiest link alone would have it, both ways at the same time."""
        n, k = self.num_hosts, self.num_servers
        passes = max(1, (n + k - 2) / k) if k else 2 * (n - 1) / n
        return SLEEP_S[self.model] + passes * gradient_bytes(self.model) / (self.rate_mbit * 1e6 / 8)

    @property
    def is_asynchronous(self) -> bool:
        return self.strategy == "ps-asp"

    @property
    def num_steps(self) -> int:
        """That are timed, about so many where workers do not wait for each other."""
        times, least = (ASYNCHRONOUS_TIMES, LEAST_ASYNCHRONOUS_STEPS) if self.is_asynchronous else (1, 1)
        return min(times * MAX_STEPS[self.model], max(least, round(times * STEPS_BUDGET_S / self.link_s)))

    @property
    def max_time_s(self) -> float | None:
        """What ends a run whose workers are not to be through one after the other."""
        return (NUM_WARMUP[self.model] + self.num_steps) * self.link_s if self.is_asynchronous else None

    @property
    def options(self) -> dict[str, str]:
        return {"servers": str(self.num_servers)} if self.num_servers else {"algorithm": "ring"}

    @property
    def max_steps(self) -> int:
        """After which a worker is through: more than there is time for, if time ends the run."""
        if self.max_time_s is not None:
            return math.ceil(self.max_time_s / LEAST_STEP_S)
        return NUM_WARMUP[self.model] + self.num_steps

    def script(self, max_steps: int) -> tuple[Path, list[str]]:
        """The script that every worker runs, and its arguments."""
        arguments = ["--model", self.model, "--steps", str(max_steps)]
        if self.workload == "sleep":
            return HERE / "exchange_script.py", [*arguments, "--sleep-s", str(SLEEP_S[self.model])]
        return HERE / "training_script.py", [*arguments, "--batch-size", str(BATCH_SIZE[self.model])]

    def step_s(self, result: Result) -> tuple[float, float, float]:
        """Of a result, while all workers were at it: the median over workers, and the lowest and the highest.

        Raises:
            RuntimeError: some were through before others had warmed up.
        """
        ends_s: dict[int, list[float]] = {}
        for step in result.steps:
            if not (step.worker == 0 and self.is_asynchronous and self.num_servers == 1):
                ends_s.setdefault(step.worker, []).append(step.time_s)
        num_warmup = NUM_WARMUP[self.model]
        if any(len(own_s) <= num_warmup for own_s in ends_s.values()):
            raise RuntimeError(f"{self.label}: a worker took no step beyond those that warm up")
        began_s, ended_s = max(own_s[num_warmup - 1] for own_s in ends_s.values()), min(s[-1] for s in ends_s.values())
        if began_s >= ended_s:
            raise RuntimeError(f"{self.label}: workers were not at it together")
        steps_s = [(ended_s - began_s) / _steps_between(began_s, ended_s, own_s) for own_s in ends_s.values()]
        return statistics.median(steps_s), min(steps_s), max(steps_s)


def _steps_between(began_s: float, ended_s: float, ends_s: Sequence[float]) -> float:
    """How many, and parts of them, a worker took whose steps ended at `ends_s`."""
    first, last = np.interp([began_s, ended_s], ends_s, range(len(ends_s)))
    return float(last - first)


@dataclass(frozen=True)
class Row:
    """What came of a cell; of several runs, the middle one's."""

    cell: Cell
    measured_s: float
    lowest_s: float
    """Of its workers."""
    highest_s: float
    predicted_s: float = math.nan
    runs_s: tuple[float, ...] = ()
    """What each run measured."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def grid(args: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for, each once, in the order in which they are measured."""
    cells = []
    for name in args.strategies:
        strategy, _, servers = name.partition(":")
        for num_hosts, rate_mbit, model in itertools.product(args.hosts, args.rates, args.models):
            count = num_hosts if servers == "n" else int(servers or 0)
            if count <= num_hosts:
                cells.append(Cell(rate_mbit, model, args.workload, num_hosts, strategy, count))
    # To a small model, a slow link is hardly another one.
    return sorted(dict.fromkeys(cells), key=lambda c: c.model == "convnet" and c.rate_mbit < max(args.rates))


def held_out() -> list[Cell]:
    """Cells that are none of the documented grid's, those that compute among them."""
    workloads = [(model, workload) for workload in ("sleep", "compute") for model in SLEEP_S]
    cells = [
        Cell(rate_mbit, model, workload, num_hosts, strategy, num_servers)
        for num_hosts, rate_mbit, (model, workload) in itertools.product(HELD_OUT_HOSTS, HELD_OUT_MBIT, workloads)
        for strategy in ("ring", "ps-bsp", "ps-asp")
        for num_servers in ((0,) if strategy == "ring" else (1, num_hosts))
    ]
    assert all(cell.is_held_out for cell in cells)
    return cells


def missed(rows: Sequence[Row], cells: Sequence[Cell]) -> list[str]:
    """What of the promise does not hold on these cells; a cell without a number is one of which nothing is known."""
    known = [row for row in rows if row.cell in set(cells) and math.isfinite(row.error)]
    said = [f"{len(cells) - len(known)} of {len(cells)} cells have no number"] * (len(known) < len(cells))
    if known:
        found = summary_of(known)
        for name, bound in (("median", MEDIAN_BOUND), ("worst", WORST_BOUND)):
            if found[name] > bound:
                said.append(f"the {name} error is {found[name]:.1%}, more than {bound:.0%}")
    return said


def summary_of(rows: Sequence[Row]) -> dict[str, float]:
    """Of the errors' absolute values."""
    errors = [abs(row.error) for row in rows]
    return {"rows": len(rows), "median": statistics.median(errors), "worst": max(errors)}
