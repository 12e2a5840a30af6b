"""`paceline demo`: the same script under three strategies, on the digits that ship with the package."""

from __future__ import annotations

import tempfile
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline import launch
from paceline.cli import tables
from paceline.cli.watching import ProgressLine
from paceline.config import RunConfig
from paceline.engines.ray.cluster import connected
from paceline.result import Result

_STRATEGIES = ("all-reduce", "ps-bsp", "ps-async")
_WORKERS = (1, 2)
_EVAL_EVERY = 20


def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the results in this new directory.")] = None,
    seed: Annotated[int, typer.Option(help="Of the model and the data order.")] = 0,
) -> None:
    """Train a small conv net on digits to 95 % under three strategies, with 1 and 2 workers, and compare them."""
    console = Console(stderr=True)
    console.print("Training to 95 % test accuracy on 1,797 handwritten digits: real processes on a local Ray.")
    if out is not None:
        _run_all(out, seed, console)
        return
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as directory:
        _run_all(Path(directory), seed, console)


def _run_all(directory: Path, seed: int, console: Console) -> None:
    results: list[Result] = []
    script = Path(str(resources.files("paceline").joinpath("demo_script.py")))
    with connected(None):
        for strategy in _STRATEGIES:
            for workers in _WORKERS:
                label = f"{strategy} x {workers}"
                with ProgressLine(console, label, RunConfig()) as watcher:
                    result = launch.run(
                        script,
                        strategy=strategy,
                        workers=workers,
                        target="accuracy=0.95",
                        eval_every=_EVAL_EVERY,
                        seed=seed,
                        device="cpu",
                        out=directory / f"{strategy}-{workers}",
                        watcher=watcher,
                    )
                results.append(result)
                console.print(f"{label}: accuracy {result.metrics['accuracy']:.1%} after {result.iteration} steps")
    Console().print(tables.comparison(results, metric="accuracy", title="Digits to 95 % test accuracy"))
    Console().print("Speed-up: one worker's time to target over this one's, same strategy. Next: paceline run --help")
