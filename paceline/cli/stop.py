"""`paceline stop`: have a run save itself and end."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.scale import directory_of
from paceline.engines import requests


def stop(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of the run, or its name under runs/.", show_default=False)
    ],
) -> None:
    """Have a run that is under way on this host save itself and end, as Ctrl-C in its terminal does.

    Example: paceline stop runs/mine
    """
    Console(soft_wrap=True).print(requests.ask(directory_of(run), {"do": "stop"}), markup=False, highlight=False)
