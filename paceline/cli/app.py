"""The commands together, and how errors are shown."""

from __future__ import annotations

import signal
import sys
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli import compare, demo, doctor, plan, probe, report, run, strategies, timeline, watching
from paceline.errors import PacelineError, UsageError

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("compare")(compare.compare)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("timeline")(timeline.timeline)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("probe")(probe.probe)
app.command("strategies")(strategies.strategies)

EXIT_FAILED, EXIT_USAGE = 1, 2


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
    console = Console(stderr=True, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
        sys.exit(watching.EXIT_INTERRUPTED)
