"""Which way of saying less gets there first on slow links: time to accuracy, beside DDP's exchange and none at all.

    python benchmarks/time_to_accuracy.py
    python benchmarks/time_to_accuracy.py --part resnet18 --rate 0.02 --only local-sgd:every=50
    python benchmarks/time_to_accuracy.py --part mnist

Real gradients on CIFAR-10 or MNIST, on 8 simulated hosts of 32 cores, 100 Mbit/s and 100 us apart. Each method has the
better of two learning rates, found on a seed that is not judged; with --rate all have that one. They are studies in
`studies`, one for each number of workers, which go on where they were.

The ceiling is what DDP's exchange (a ring, float32) would take if it took no time: its steps, with their computing
alone. The gap that a method closes lies between these two. What the plan picks, by the noise scale that it measures and
the steps that one worker has taken, is run as well. Planned steps are one worker's, times what the plan takes others to
need beside it.

Runs are judged every so many steps of a worker, however many workers there are: who is judged after more steps is told
later that it is there. Two evaluations in a row are to reach the target, as the lab asks for by itself, so that a lucky
one ends no run; what counts is the time until the first (--hold 1: one is enough).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from report import tell
from rich.table import Table

from paceline.cluster import reading
from paceline.engines.scripting import read_script
from paceline.lab import words
from paceline.lab.study import Study
from paceline.lab.variant import Variant
from paceline.planner import observing, predict
from paceline.planner.search import Plan, plan
from paceline.running.result import Result

RECIPE = Path(__file__).parents[1] / "recipes" / "low_bandwidth"
SCRIPT, CLUSTER, WORKERS = RECIPE / "train.py", RECIPE / "hosts-100mbit.toml", 8
DDP = "ring"
Method = tuple[str, int]
"""A strategy, and on how many workers."""


@dataclass(frozen=True)
class Part:
    """A model, and how far it is to come."""

    accuracy: float
    arguments: tuple[str, ...]
    max_steps: int
    """Of each worker."""
    eval_every: int
    """Batches of all `WORKERS` together; fewer workers are judged after as many steps, which have fewer batches."""
    strategies: tuple[str, ...]
    """Of all `WORKERS`, beside DDP's exchange."""
    fewer: tuple[Method, ...] = ()
    """What is run on fewer workers, beside one."""
    rates: tuple[str, ...] = ("0.02", "0.05")

    @property
    def script(self) -> list[str]:
        return ["--schedule", "constant", *self.arguments]

    def methods(self, only: Sequence[str] | None) -> list[Method]:
        """DDP's exchange, one worker, and all others or those of the strategies that are asked for."""
        wanted = self.strategies if only is None else only
        fewer = [each for each in self.fewer if each[0] in wanted]
        return [*dict.fromkeys([(DDP, WORKERS), *((text, WORKERS) for text in wanted), *fewer, ("single", 1)])]


def _less_said(powersgd: str) -> tuple[str, ...]:
    return (
        "all-reduce",
        f"all-reduce:codec=powersgd:{powersgd}",
        "all-reduce:codec=int8",
        "all-reduce:codec=top-k",
        "all-reduce:codec=one-bit",
        "local-sgd:every=8",
        "local-sgd:every=50",
        "diloco:every=8",
        "diloco:every=50",
        "diloco:every=50:fragments=2:delay=10:alpha=0.5",
        "gossip:topology=one-peer:mode=push-sum:own_scores=false",
        "gossip:topology=one-peer:mode=push-sum:order=awc:own_scores=false",
        "gossip:topology=ring:own_scores=false",
    )


PARTS = {
    "convnet": Part(
        accuracy=0.40,
        arguments=("--dataset", "cifar10", "--model", "convnet", "--batch-size", "100", "--eval-samples", "2000"),
        max_steps=400,
        eval_every=80,
        strategies=_less_said("codec.rank=1:codec.start=10"),
        fewer=(("local-sgd:every=50", 4), ("local-sgd:every=50", 2)),
    ),
    "resnet18": Part(
        accuracy=0.40,
        arguments=(
            *("--dataset", "cifar10", "--model", "resnet18", "--width", "8"),
            *("--batch-size", "20", "--eval-samples", "1000"),
        ),
        max_steps=400,
        eval_every=160,
        strategies=_less_said("codec.rank=4:codec.start=10"),
        fewer=(("local-sgd:every=50", 4),),
    ),
    "mnist": Part(
        accuracy=0.90,
        arguments=("--dataset", "mnist", "--model", "convnet", "--batch-size", "20", "--eval-samples", "2000"),
        max_steps=400,
        eval_every=160,
        strategies=("local-sgd:every=8", "local-sgd:every=20", "local-sgd:every=50"),
        fewer=(("local-sgd:every=50", 3),),
        rates=("0.02",),
    ),
}


def conduct(
    part: Part, methods: Sequence[Method], *, workers: int, seeds: int, rates: Sequence[str], hold: int, out: Path
) -> Study:
    """Those of the methods that have so many workers."""
    rate = ["--lr", *rates] if len(rates) == 1 else []
    return Study.run(
        SCRIPT,
        strategies=[text for text, own in methods if own == workers],
        workers=[workers],
        seeds=seeds,
        target=f"accuracy={part.accuracy}",
        hold=hold,
        tune=() if rate else [f"lr={','.join(rates)}"],
        eval_every=part.eval_every * workers // WORKERS,
        engine="virtual",
        cluster=CLUSTER,
        arguments=[*part.script, "--steps", str(part.max_steps * WORKERS // workers), *rate],
        out=out.with_name(f"{out.name}-{workers}"),
        retry_failed=True,
    )


def planned(part: Part, rate: str, one_steps: float | None) -> Plan:
    """The noise scale is measured.

    Args:
        rate: at which it is: one worker's.
        one_steps: of one worker to the target; none where a run of it did not come there.
    """
    seen = observing.observe(read_script(SCRIPT, [*part.script, "--lr", rate]), measures_noise=True)
    cluster = reading.load(str(CLUSTER))
    return plan(cluster, seen.work, max_workers=WORKERS, noise=seen.noise, single_steps=one_steps)


def planned_steps(found: Plan, strategy: str, workers: int, one_steps: float | None) -> float:
    """nan where no plan says."""
    if strategy == "single" or one_steps is None:
        return one_steps or math.nan
    wanted = plan(
        found.cluster,
        found.work,
        strategies=["single", strategy],
        max_workers=workers,
        noise=found.noise,
        single_steps=one_steps,
    )
    point = next(point for point in wanted.points if point.asked != "single" and point.prediction.workers == workers)
    return point.target_s / point.prediction.update_s if point.is_ranked and point.target_s is not None else math.nan


def ceiling_s(study: Study, found: pd.DataFrame) -> float:
    """Seconds to the target of DDP's steps without their exchange: what its workers computed until then; the mean."""
    rows = found[found["strategy"] == DDP]
    results = [Result.open(study.directory / "trials" / each) for each in rows["trial"]]
    step_s = [sum(step.compute_s for step in result.steps) / len(result.steps) for result in results]
    return float((rows["iterations_to_target"] * step_s).mean())


def show(
    part: Part,
    methods: Sequence[Method],
    studies: Mapping[int, Study],
    found: Plan,
    one_steps: float | None,
    rates: Sequence[str],
) -> None:
    everyone = studies[WORKERS].frames.trials
    best_s = ceiling_s(studies[WORKERS], everyone)
    ddp_s = float(everyone[everyone["strategy"] == DDP]["time_to_target_s"].mean())
    table = Table()
    table.add_column("method")
    titles = ("rate", "steps", "steps planned", "ms a step", "ms planned", "seconds", "range", "sooner", "gap closed")
    for title in titles:
        table.add_column(title, justify="right")
    pick = pick_of(found, methods)
    for text, workers in methods:
        trials = studies[workers].frames.trials
        own = trials[trials["strategy"] == Variant.parse(text).text]
        step_s = predict(found.cluster, strategy=text, workers=workers, work=found.work).step_s
        steps = own["samples"] / found.work.samples / workers
        steps_there = own["samples_to_target"] / found.work.samples / workers
        times = own["time_to_target_s"]
        took_s = float(times.mean()) if own["reached"].all() else float("nan")
        cells = (
            rate_of(own, rates),
            f"{steps_there.mean():.0f} ({steps_there.min():.0f} to {steps_there.max():.0f})",
            f"{planned_steps(found, text, workers, one_steps):.0f}",
            f"{float((own['training_time_s'] / steps).mean()) * 1e3:.2f}",
            f"{step_s * 1e3:.2f}",
            f"{took_s:.3f}",
            f"{times.min():.3f} to {times.max():.3f}",
            f"{ddp_s / took_s:.1f}",
            f"{(ddp_s - took_s) / (ddp_s - best_s):.0%}",
        )
        name = f"`{text}`{f', {words.workers(workers)}' if workers != WORKERS else ''}"
        picked = ", which the plan picks" if (text, workers) == pick else ""
        table.add_row(f"{name}{picked}", *("" if "nan" in cell else cell for cell in cells))
    table.add_row("no exchange", "", "", "", "", "", f"{best_s:.3f}", "", f"{ddp_s / best_s:.1f}", "100%")
    assert found.noise is not None
    facts = {"picked": f"{pick[0]} on {pick[1]}", "noise_samples": round(found.noise.samples)}
    tell([table], {**facts, "accuracy": part.accuracy, "seeds": int(everyone["seed"].nunique())})


def rate_of(trials: pd.DataFrame, rates: Sequence[str]) -> str:
    """The learning rate of a method's trials."""
    return str(trials["setting"].iloc[0]).removeprefix("lr=") or rates[0]


def pick_of(found: Plan, methods: Sequence[Method]) -> Method:
    """By the name that it has among the methods, if it is one of them."""
    picked = found.best.label, found.best.prediction.workers
    return next((each for each in methods if (Variant.parse(each[0]).text, each[1]) == picked), picked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="convnet")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="STRATEGY", help="these, beside DDP's exchange and one worker")
    parser.add_argument("--rate", help="the learning rate of all")
    parser.add_argument("--hold", type=int, default=2, help="evaluations in a row that reach the target")
    parser.add_argument("--out", type=Path, help="by default studies/low-bandwidth-PART, or with -RATE behind it")
    args = parser.parse_args()
    torch.set_num_threads(1)  # on any machine the same sums, of which a ResNet's steps to a target depend
    part = PARTS[args.part]
    name = "-".join(filter(None, (args.part, args.rate)))
    out = args.out or Path("studies") / f"low-bandwidth-{name}"
    rates = part.rates if args.rate is None else (args.rate,)
    each = partial(conduct, part, seeds=args.seeds, rates=rates, hold=args.hold, out=out)
    methods = part.methods(args.only)
    studies = {workers: each(methods, workers=workers) for workers in dict.fromkeys(own for _, own in methods)}
    single = studies[1].frames.trials
    one_steps = float(single["iterations_to_target"].mean()) if single["reached"].all() else None
    found = planned(part, rate_of(single, rates), one_steps)
    pick = pick_of(found, methods)
    if pick not in methods:
        methods.append(pick)
        studies[pick[1]] = each(methods, workers=pick[1])
    show(part, methods, studies, found, one_steps, rates)


if __name__ == "__main__":
    main()
