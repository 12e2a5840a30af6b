"""`paceline scale`: more or fewer workers, or more servers, for a run that trains."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.engines import requests
from paceline.errors import UsageError


def scale(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of the run, or its name under runs/.", show_default=False)
    ],
    workers: Annotated[int | None, typer.Option(help="Workers that it is to have.", show_default=False)] = None,
    servers: Annotated[
        int | None, typer.Option(help="Servers that it is to have; with replicas.", show_default=False)
    ] = None,
) -> None:
    """Have more or fewer workers, or more servers, in a run with --elastic while it goes on.

    New workers take the state of one that trains, and join it between two steps. Those that leave do so between two
    steps, the ones that came last first; their data are dealt to the others. New servers are given copies of key
    ranges, and serve some of these, until all have as many as each other.

    Example: paceline scale runs/mine --workers 4
    """
    if workers is None and servers is None:
        raise UsageError("say how many: --workers N, --servers N, or both")
    said = requests.ask(directory_of(run), {"do": "scale", "workers": workers, "servers": servers})
    Console(soft_wrap=True).print(said, markup=False, highlight=False)


def directory_of(run: Path) -> Path:
    """Raises UsageError if there is none."""
    for directory in (run, Path("runs") / run):
        if directory.is_dir():
            return directory
    raise UsageError(f"{run} is no directory of a run, nor is runs/{run}")
