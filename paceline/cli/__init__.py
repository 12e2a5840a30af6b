"""The command line: one file a command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from paceline.cli import demo, doctor, run, strategies
from paceline.errors import PacelineError, UsageError

app = typer.Typer(
    name="paceline",
    help="Train one PyTorch script under any data-parallel architecture, and see which gets there first.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("strategies")(strategies.strategies)

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main() -> None:
    """Run the command line; errors that Paceline raises on purpose are shown as their message alone."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        app()
    except UsageError as error:
        console.print("[bold red]error:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        sys.exit(EXIT_USAGE)
    except PacelineError as error:
        console.print("[bold red]failed:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
