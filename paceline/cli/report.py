"""`paceline report`: the report of one study again, or of several side by side."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of studies.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write.", show_default="report.html in DIR, or of several studies in this directory"
        ),
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Make the report of a study again, from its records; of several studies, side by side in one report.

    Example: paceline report runs/one-server runs/two-servers --out servers.html
    """
    path = write(directories, out)
    Console(soft_wrap=True).print(str(path), markup=False, highlight=False)
    if opens:
        webbrowser.open(path.resolve().as_uri())


def write(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of these studies; returns where it is."""
    from paceline.lab import report_page  # here, because plotly takes a while to load

    path = out or (directories[0] if len(directories) == 1 else Path()) / report_page.FILE_NAME
    report_page.write(directories, path)
    return path
