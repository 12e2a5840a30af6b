"""`paceline timeline`: a run as a trace for Perfetto or Chrome."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.lab import trace as lab_timeline


def timeline(
    directory: Annotated[Path, typer.Argument(help="Directory of a run, or of a study's trial.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; compressed if it ends in .gz.",
            show_default=f"{lab_timeline.FILE_NAME} in the directory",
        ),
    ] = None,
    begin: Annotated[float, typer.Option("--from", help="Seconds on the training clock where it begins.")] = 0.0,
    end: Annotated[
        float, typer.Option("--to", help="Seconds on the training clock where it ends.", show_default="the end")
    ] = math.inf,
) -> None:
    """Write what every worker and server did when, from a run's records: open it at ui.perfetto.dev.

    Of a long run only its first 100,000 steps, or those of the window that you choose.

    Example: paceline timeline studies/train/trials/ps-bsp-n4-s0 --from 60 --to 75
    """
    written = in_words(*lab_timeline.write(directory, out, begin_s=begin, end_s=end))
    Console(soft_wrap=True).print(written, markup=False, highlight=False)


def in_words(path: Path, window: lab_timeline.Window) -> str:
    """Where it lies; and what it holds, if that is not all."""
    return f"{path} ({window})" if window.num_left_out else str(path)
