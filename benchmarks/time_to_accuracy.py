"""Which way of saying less gets there first on slow links: time to accuracy, beside DDP's exchange and none at all.

    python benchmarks/time_to_accuracy.py
    python benchmarks/time_to_accuracy.py --part resnet18 --seeds 1

Real gradients on CIFAR-10, on 8 simulated hosts of 32 cores, 100 Mbit/s and 100 us apart. Each method has the best of
two learning rates, found on a seed that is not judged. It is a study in `studies`, which goes on where it was.

The ceiling is what DDP's exchange (a ring, float32) would take if it took no time: its steps, with their computing
alone. The gap that a method closes lies between these two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from report import tell
from rich.table import Table

from paceline.cluster import reading
from paceline.engines.scripting import read_script
from paceline.lab.study import Study
from paceline.lab.variant import Variant
from paceline.planner import observing, predict
from paceline.planner.search import plan
from paceline.running.result import Result

RECIPE = Path(__file__).parents[1] / "recipes" / "low_bandwidth"
SCRIPT, CLUSTER, WORKERS = RECIPE / "train.py", RECIPE / "hosts-100mbit.toml", 8
DDP = "ring"


@dataclass(frozen=True)
class Part:
    """A model, and how far it is to come."""

    accuracy: float
    arguments: tuple[str, ...]
    rates: str
    max_steps: int
    """Of each worker."""
    eval_every: int
    """Batches of all workers together."""
    powersgd: str

    @property
    def script(self) -> list[str]:
        return ["--dataset", "cifar10", "--schedule", "constant", *self.arguments]

    @property
    def strategies(self) -> tuple[str, ...]:
        return (
            DDP,
            "all-reduce",
            f"all-reduce:codec=powersgd:{self.powersgd}",
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
        arguments=("--model", "convnet", "--batch-size", "100", "--eval-samples", "2000"),
        rates="0.02,0.05",
        max_steps=400,
        eval_every=80,
        powersgd="codec.rank=1:codec.start=10",
    ),
    "resnet18": Part(
        accuracy=0.40,
        arguments=("--model", "resnet18", "--width", "8", "--batch-size", "20", "--eval-samples", "1000"),
        rates="0.02,0.05",
        max_steps=400,
        eval_every=160,
        powersgd="codec.rank=4:codec.start=10",
    ),
}


def conduct(part: Part, strategies: Sequence[str], *, workers: int, seeds: int, tunes: bool, out: Path) -> Study:
    rate = [] if tunes else ["--lr", part.rates.split(",")[1]]
    return Study.run(
        SCRIPT,
        strategies=strategies,
        workers=[workers],
        seeds=seeds,
        target=f"accuracy={part.accuracy}",
        hold=1,
        tune=[f"lr={part.rates}"] if tunes else (),
        eval_every=part.eval_every,
        engine="virtual",
        cluster=CLUSTER,
        arguments=[*part.script, "--steps", str(part.max_steps * WORKERS // workers), *rate],
        out=out,
    )


def ceiling_s(study: Study, found: pd.DataFrame) -> float:
    """Seconds to the target of DDP's steps without their exchange: what its workers computed until then; the mean."""
    rows = found[found["strategy"] == DDP]
    results = [Result.open(study.directory / "trials" / each) for each in rows["trial"]]
    step_s = [sum(step.compute_s for step in result.steps) / len(result.steps) for result in results]
    return float((rows["iterations_to_target"] * step_s).mean())


def show(part: Part, study: Study, alone: Study) -> None:
    found = study.frames.trials
    cluster = reading.load(str(CLUSTER))
    work = observing.observe(read_script(SCRIPT, part.script)).work
    best_s, ddp_s = ceiling_s(study, found), float(found[found["strategy"] == DDP]["time_to_target_s"].mean())
    table = Table()
    table.add_column("method")
    for title in ("rate", "steps", "ms a step", "ms planned", "seconds", "range", "sooner", "gap closed"):
        table.add_column(title, justify="right")
    for text in (*part.strategies, "single"):
        rows = pd.concat([found, alone.frames.trials])
        rows = rows[rows["strategy"] == Variant.parse(text).text]
        workers = 1 if text == "single" else WORKERS
        planned = predict(cluster, strategy=text, workers=workers, work=work).step_s * 1e3
        steps = rows["samples"] / work.samples / workers
        times = rows["time_to_target_s"]
        took_s = float(times.mean()) if rows["reached"].all() else float("nan")
        rate = str(rows["setting"].iloc[0]).removeprefix("lr=") if len(rows) else ""
        cells = (
            rate,
            f"{float((rows['samples_to_target'] / work.samples / workers).mean()):.0f}",
            f"{float((rows['training_time_s'] / steps).mean()) * 1e3:.2f}",
            f"{planned:.2f}",
            f"{took_s:.3f}",
            f"{times.min():.3f} to {times.max():.3f}",
            f"{ddp_s / took_s:.1f}",
            f"{(ddp_s - took_s) / (ddp_s - best_s):.0%}",
        )
        name = f"`{text}`" if workers > 1 else f"`{text}`, one worker"
        table.add_row(name, *(cell if "nan" not in cell else "" for cell in cells))
    table.add_row("no exchange", "", "", "", "", f"{best_s:.3f}", "", f"{ddp_s / best_s:.1f}", "100%")
    picked = plan(cluster, work, max_workers=WORKERS).best.label
    tell([table], {"picked": picked, "accuracy": part.accuracy, "seeds": int(found["seed"].nunique())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="convnet")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", action=argparse.BooleanOptionalAction, default=True, help="the learning rate")
    parser.add_argument("--out", type=Path, help="by default studies/low-bandwidth-PART")
    args = parser.parse_args()
    part = PARTS[args.part]
    out = args.out or Path("studies") / f"low-bandwidth-{args.part}"
    each = partial(conduct, part, seeds=args.seeds, tunes=args.tune)
    alone = each(("single",), workers=1, out=out.with_name(f"{out.name}-alone"))
    show(part, each(part.strategies, workers=WORKERS, out=out), alone)


if __name__ == "__main__":
    main()
