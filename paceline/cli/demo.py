"""`paceline demo`: a study of three strategies on the digits that ship with the package, and its report."""

from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.compare import conduct
from paceline.lab.spec import StudySpec

_STRATEGIES = ("all-reduce", "ps-bsp", "ps-asp")
_WORKERS = (1, 2)
_NUM_SEEDS = 2
_EVAL_EVERY = 20


def demo(
    out: Annotated[
        Path | None, typer.Option(help="The study's directory.", show_default="a new one under runs/")
    ] = None,
    seed: Annotated[int, typer.Option(help="The first of two.")] = 0,
) -> None:
    """Compare three strategies with 1 and 2 workers: which trains a small conv net on digits to 95 % first?"""
    console = Console(stderr=True, soft_wrap=True)
    console.print("Training to 95 % test accuracy on 1,797 handwritten digits: real processes on a local Ray.")
    if out is None:
        out = Path("runs") / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        console.print(f"Its files are kept in {out}; --out DIR keeps them elsewhere.", highlight=False)
    spec = StudySpec.create(
        str(resources.files("paceline").joinpath("demo_script.py")),
        strategies=_STRATEGIES,
        workers=_WORKERS,
        seeds=range(seed, seed + _NUM_SEEDS),
        target="accuracy=0.95",
        eval_every=_EVAL_EVERY,
        device="cpu",
    )
    conduct(spec, out)
    Console().print("Next: paceline compare --help")
