"""Figures of docs/experiment.md, of studies that recipes/ray_parameter_server/study.py has run.

    python benchmarks/published_study.py studies/resnet18 studies/resnet18-both studies/vgg16 --figures docs/figures

Accuracy over time and over iterations of each study's first seed, and the speed-up of all synchronous ones together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from plots import Series, line_chart

from paceline.lab.study import Study

MOST_POINTS = 24
"""Of a curve; of more, neighbours are averaged."""


def name_of(strategy: str, workers: int) -> str:
    return f"{strategy}, {workers}"


def curve(evaluations: pd.DataFrame, over: str) -> list[tuple[float, float]]:
    """Accuracy in per cent."""
    every = -(-len(evaluations) // MOST_POINTS)
    means = evaluations[[over, "value"]].groupby([place // every for place in range(len(evaluations))]).mean()
    return [(float(at), 100 * float(accuracy)) for at, accuracy in means.itertuples(index=False)]


def curves(study: Study, over: str) -> list[Series]:
    """A line for each strategy and number of workers."""
    evaluations = study.frames.evaluations
    first = evaluations[(evaluations["seed"] == evaluations["seed"].min()) & (evaluations["metric"] == "accuracy")]
    return [
        Series(name_of(str(strategy), int(workers)), curve(rows, over))
        for (strategy, workers), rows in first.groupby(["strategy", "workers"], sort=False)
    ]


def speed_ups(studies: Iterable[Study]) -> list[Series]:
    """Of strategies with a row for one worker; the mean over seeds."""
    series = []
    for study in studies:
        for strategy, rows in study.frames.summary.groupby("strategy", sort=False):
            reached = rows[rows["speedup"].notna()]
            if len(reached) > 1 and 1 in set(reached["workers"]):
                points = [(float(n), float(x)) for n, x in reached[["workers", "speedup"]].itertuples(index=False)]
                series.append(Series(f"{study.name}, {strategy}", points))
    return series


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    args = parser.parse_args()
    studies = [Study.open(directory) for directory in args.studies]
    for study in studies:
        for over, label in (("time_s", "seconds of the simulated cluster"), ("iteration", "iterations")):
            chart = line_chart(
                curves(study, over), title=f"{study.name}: accuracy", x_label=label, y_label="accuracy, %"
            )
            (args.figures / f"experiment-{study.name}-{over.removesuffix('_s')}.svg").write_text(
                chart, encoding="utf-8"
            )
    found = speed_ups(studies)
    chart = line_chart(found, title="Speed-up to the target", x_label="workers", y_label="times one worker")
    (args.figures / "experiment-nets.svg").write_text(chart, encoding="utf-8")
    for one in found:
        print(one.name, *(f"{int(workers)}: {ratio:.2f}" for workers, ratio in one.points), sep="  ")


if __name__ == "__main__":
    main()
