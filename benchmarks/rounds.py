"""Contenders measured side by side: one after another in every round, so that the machine's mood meets all of them."""

from __future__ import annotations

import compileall
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import paceline

Measure = Callable[..., float]
"""Samples per second on a workload."""


def run_rounds(measures: Mapping[str, Measure], *, num_rounds: int, **workload: object) -> dict[str, list[float]]:
    """Each contender's rates, one a round."""
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(num_rounds):
        for name, measure in measures.items():
            rates[name].append(measure(**workload))
            print(
                f"{workload['model']} round {number + 1}/{num_rounds}  {name}: {rates[name][-1]:,.1f} samples/s",
                file=sys.stderr,
            )
    return rates


def ratio_of(values: Sequence[float], others: Sequence[float]) -> str:
    """Median of the ratios within a round, with the lowest and the highest."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compile_paceline() -> None:
    """As pip leaves a package. Each process would else compile what it imports, where none may write it down
    (PYTHONDONTWRITEBYTECODE)."""
    compileall.compile_dir(Path(str(paceline.__file__)).parent, quiet=1)
