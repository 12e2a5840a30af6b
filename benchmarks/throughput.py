"""Samples per second of Paceline's strategies beside the same training without communication, under PyTorch's
DistributedDataParallel over gloo, and under the parameter server of Ray's documentation.

All contenders run one after another in every round, so that a change of the machine's mood meets all of them; the
table gives medians over the rounds, and of the ratios within a round, with their spread.

    python benchmarks/throughput.py --model convnet --workers 2 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from peers import ceiling, ddp_gloo, horovod_script, ray_parameter_server
from peers.workload import cycle_batches, make_model, make_optimizer, train_step
from report import tell
from rich.table import Table
from rounds import Measure, ratio_of, run_rounds
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.running.launch import Quiet

EPOCH_SAMPLES = 1_000_000


class FixedBatches(Dataset[tuple[Tensor, Tensor]]):
    """The peers' batches behind a real loader: whatever indices are asked for, the next fixed batch comes."""

    def __init__(self, batch_size: int, *, seed: int) -> None:
        self._batches = cycle_batches(batch_size, seed=seed)

    def __len__(self) -> int:
        return EPOCH_SAMPLES

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return next(self._batches)


def whole(batch: Any) -> Any:
    """The batches are collated already."""
    return batch


def train(model_name: str, batch_size: int) -> None:
    """What each Paceline worker runs: a script as a user writes it."""
    worker = paceline.init()
    model = make_model(model_name)
    optimizer = make_optimizer(model)
    data = FixedBatches(batch_size, seed=worker.rank)
    loader = DataLoader(data, batch_size=batch_size, collate_fn=whole)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    while True:
        for batch in loader:
            train_step(model, optimizer, batch)


def measure_paceline(
    strategy: str,
    options: Mapping[str, object],
    *,
    model: str,
    num_workers: int,
    batch_size: int,
    seconds: float,
    warmup_seconds: float,
) -> float:
    """Samples per second of all workers, from the step records after the warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            partial(train, model, batch_size),
            strategy=strategy,
            workers=num_workers,
            options=options,
            max_time_s=warmup_seconds + seconds,
            device="cpu",
            watcher=Quiet(),
            out=Path(directory) / "run",
        )
        steps = [step for step in result.steps if step.time_s > warmup_seconds]
        elapsed_s = max(step.time_s for step in steps) - warmup_seconds
        return sum(step.samples for step in steps) / elapsed_s


def measure_single(*, num_workers: int, **workload: Any) -> float:
    """One worker without exchange, which has all cores to itself."""
    return measure_paceline("single", {}, num_workers=1, **workload)


def contenders(servers: int) -> dict[str, Measure]:
    """Everything that is measured, by name; the first is the limit of the others."""
    ps = {"servers": servers}
    return {
        "ceiling": ceiling.measure,
        "lockstep": partial(ceiling.measure, mode="lockstep"),
        "ddp-gloo": ddp_gloo.measure,
        "ray-example-sync": partial(ray_parameter_server.measure, mode="sync"),
        "ray-example-async": partial(ray_parameter_server.measure, mode="async"),
        "horovod-script": horovod_script.measure,
        "single": measure_single,
        "all-reduce": partial(measure_paceline, "all-reduce", {}),
        "ps-bsp": partial(measure_paceline, "ps-bsp", ps),
        "ps-asp": partial(measure_paceline, "ps-asp", ps),
        "ps-asp-torn": partial(measure_paceline, "ps-asp", {**ps, "torn_reads": True}),
    }


PEER_OF = {
    "horovod-script": "ddp-gloo",
    "all-reduce": "ddp-gloo",
    "ps-bsp": "ray-example-sync",
    "ps-asp": "ray-example-async",
    "ps-asp-torn": "ps-asp",
}


def table_of(rates: Mapping[str, Sequence[float]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("contender", "samples/s", "lowest", "highest", "of ceiling", "of its peer"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, values in rates.items():
        peer = PEER_OF.get(name, "")
        table.add_row(
            name,
            f"{statistics.median(values):,.0f}",
            f"{min(values):,.0f}",
            f"{max(values):,.0f}",
            ratio_of(values, rates["ceiling"]) if "ceiling" in rates else "-",
            f"{ratio_of(values, rates[peer])} x {peer}" if peer in rates else "-",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=100, help="samples a worker and step")
    parser.add_argument("--servers", type=int, default=1, help="parameter servers of the ps strategies")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each timed window")
    parser.add_argument("--warmup-seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="contenders to measure; default all")
    args = parser.parse_args()
    measures = contenders(args.servers)
    for name in args.only or ():
        if name not in measures:
            parser.error(f"no contender {name!r}; known are {', '.join(measures)}")
    chosen = {name: measure for name, measure in measures.items() if not args.only or name in args.only}
    workload = {
        "model": args.model,
        "num_workers": args.workers,
        "batch_size": args.batch_size,
        "seconds": args.seconds,
        "warmup_seconds": args.warmup_seconds,
    }
    rates = run_rounds(chosen, num_rounds=args.rounds, **workload)
    title = f"{args.model}, batch {args.batch_size} a worker, {args.workers} workers, median of {args.rounds}"
    tell([table_of(rates, title)], {"workload": workload, "samples_per_s": rates})


if __name__ == "__main__":
    main()
