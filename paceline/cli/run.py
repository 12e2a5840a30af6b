"""`paceline run`: train one script under one strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from paceline import launch
from paceline.cli import tables
from paceline.cli.watching import EXIT_INTERRUPTED, ProgressLine
from paceline.config import DeviceChoice, RunConfig
from paceline.errors import UsageError


def run(
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    strategy: Annotated[str, typer.Option(help="A name from `paceline strategies`.")] = "all-reduce",
    workers: Annotated[int, typer.Option(help="Processes that train.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the strategy; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster (default: RAY_ADDRESS; else one is started here for the run)."),
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="End after so many iterations.")] = None,
    max_time: Annotated[float | None, typer.Option(help="End after so many seconds of training.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Iterations between evaluations.")] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            help="Iterations between checkpoints.", show_default="every 30 s, at an evaluation, and at the end"
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="End when an evaluation reaches this.", metavar="METRIC=VALUE")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the model, the data order and every random generator.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    deadline: Annotated[float, typer.Option(help="Seconds that any wait for a peer may take.")] = 300.0,
    out: Annotated[
        Path | None, typer.Option(help="Result directory, new or empty.", show_default="a new one under runs/")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run of this result directory.")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after --.", show_default=False)
    ] = None,
) -> None:
    """Train SCRIPT under one strategy: real processes, on this machine or a Ray cluster.

    Example: paceline run train.py --strategy ps-async --workers 4 --option servers=2 -- --lr 0.1
    """
    console = Console(stderr=True)
    config = RunConfig(max_steps=max_steps)
    try:
        with ProgressLine(console, f"{strategy} x {workers}", config) as watcher:
            result = launch.run(
                script,
                strategy=strategy,
                workers=workers,
                options=_options(option or []),
                arguments=arguments or (),
                address=address,
                max_steps=max_steps,
                max_time_s=max_time,
                eval_every=eval_every,
                checkpoint_every=checkpoint_every,
                target=target,
                seed=seed,
                device=cast(DeviceChoice, device),
                deadline_s=deadline,
                out=out,
                resume=resume,
                watcher=watcher,
            )
    except KeyboardInterrupt as interrupt:
        console.print(str(interrupt) or "interrupted", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    Console().print(tables.summary(result))


def _options(texts: list[str]) -> dict[str, Any]:
    """`key=value` texts as a mapping.

    Raises:
        UsageError: a text has another form, or a key comes twice.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--option {text!r} is not of the form key=value")
        if key in options:
            raise UsageError(f"--option {key} is given twice")
        options[key] = value
    return options
