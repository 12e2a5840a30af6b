"""The commands together, and how errors are shown."""

import signal
import sys
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli import commands, exit_codes
from paceline.errors import PacelineError, UsageError

app = typer.Typer(
    name="paceline",
    cls=commands.Commands,
    epilog=commands.what_can_be_named(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
commands.add_to(app)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"paceline {metadata.version('paceline')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train one PyTorch script under any data-parallel architecture, and see which gets there first."""


def main() -> None:
    """Run the command line; errors that Paceline raises on purpose are shown as their message alone.

    SIGTERM is taken as Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except UsageError as error:
        _show("error", error)
        sys.exit(exit_codes.USAGE)
    except PacelineError as error:
        _show("failed", error)
        sys.exit(exit_codes.FAILED)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)


def _show(word: str, error: PacelineError) -> None:
    console = Console(stderr=True, soft_wrap=True)  # by now the stream may be another
    console.print(f"[bold red]{word}:[/]", end=" ")
    console.print(str(error), markup=False, highlight=False)
