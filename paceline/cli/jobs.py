"""What the commands that write jobs share: the run inside, whose mistakes are found before the job waits for hosts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from paceline.cli import commands
from paceline.errors import UsageError


def for_the_run(context: typer.Context) -> list[str]:
    """The options that are not the command's own, and the script's arguments behind them."""
    own = context.meta[commands.SCRIPTS_OWN]
    options = context.args[: len(context.args) - len(own)]
    return [*options, *(["--", *own] if own else [])]


def require_a_run(
    script: Path, rest: Sequence[str], *, jobs_own: Sequence[str], is_here: bool = True
) -> dict[str, Any]:
    """Refuses what `paceline run` would refuse at its start.

    Args:
        jobs_own: options of `paceline run` that the job sets itself.
        is_here: the script can be read on this machine.

    Returns:
        The options that are given to `paceline run`, by name.

    Raises:
        UsageError: an option is the job's own, or a strategy or a script cannot be had. Options that `paceline run`
            does not know are refused as it does.
    """
    run = commands.load("run").make_context("run", [str(script), *rest])
    given = {
        name: value
        for name, value in run.params.items()
        if run.get_parameter_source(name) is run.get_parameter_source("script")
    }
    for name in jobs_own:
        if name in given:
            raise UsageError(f"--{name} is the job's own; leave it out")
    from paceline.engines.scripting import read_script
    from paceline.pieces import parse_options
    from paceline.strategies import build

    if is_here:
        read_script(script, run.params["arguments"] or ())
    build(run.params["strategy"], parse_options(run.params["option"] or [], where="--option"))
    return given
