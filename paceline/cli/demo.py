"""`paceline demo`: one script on this machine and on a simulated laboratory, and one report of both."""

import sys
import webbrowser
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.compare import conduct, finish
from paceline.lab.spec import StudySpec

_STRATEGIES = ("all-reduce", "ps-bsp", "ps-asp")
_HERE, _LAB = (1, 2), (1, 8)
_CLUSTER = "lab-1gbe"
_ARGUMENTS = ("--model", "fedavg-cnn", "--lr", "0.01", "--scale-lr", "--batch-size", "64", "--epochs", "100")
_TARGET = "accuracy=0.95"
_EVAL_EVERY = 10


def demo(
    out: Annotated[
        Path | None, typer.Option(help="The directory of both studies.", show_default="a new one under runs/")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the model and the order of the data.")] = 0,
) -> None:
    """Train a small conv net on digits on this machine, then on a simulated laboratory: which strategy is first where?

    Real processes with 1 and 2 workers, then the same script with 1 and 8 workers on simulated hosts with 1 Gb/s
    Ethernet, under three strategies each; and one report of both.
    """
    from paceline.lab import report_page  # here, because plotly takes a while to load

    console = Console(stderr=True, soft_wrap=True)
    if out is None:
        out = Path("runs") / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"  # noqa: TID251 - a name
        console.print(f"Files are kept in {out}; --out DIR keeps them elsewhere.", highlight=False)
    console.print("1. Train on this machine, real processes on a local Ray, to 95 % of 1,797 digits:", highlight=False)
    real = conduct(_spec(_HERE, seed), out / "this-machine")
    console.print(f"2. The same script on a simulated laboratory ({_CLUSTER}), on 8 of its hosts:", highlight=False)
    simulated = conduct(_spec(_LAB, seed, engine="virtual", cluster=_CLUSTER), out / "simulated-lab")
    path = finish([real, simulated], out / report_page.FILE_NAME)
    _offer(path)
    Console().print("Next, a script of your own: paceline compare --help")


def _spec(workers: tuple[int, ...], seed: int, **where: Any) -> StudySpec:
    return StudySpec.create(
        str(resources.files("paceline").joinpath("demo_script.py")),
        arguments=_ARGUMENTS,
        strategies=_STRATEGIES,
        workers=workers,
        seeds=[seed],
        target=_TARGET,
        eval_every=_EVAL_EVERY,
        device="cpu",
        **where,
    )


def _offer(path: Path) -> None:
    """Ask whoever sits at a terminal whether the browser is to show the report."""
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    if is_asked and typer.confirm("Show it in the browser?", default=True):
        webbrowser.open(path.resolve().as_uri())
