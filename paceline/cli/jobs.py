"""What the commands that write jobs share: the run inside, whose mistakes are found before the job waits for hosts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from paceline.cli import commands, job_hosts
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
    params, given = _options("run", script, rest, jobs_own=jobs_own)
    from paceline.engines.scripting import read_script
    from paceline.pieces import parse_options
    from paceline.strategies import build

    default = job_hosts.STRATEGY
    if is_here:
        default = job_hosts.default_strategy(read_script(script, (), may_alias=params["alias"]))
    strategy = default if params["strategy"] is None else params["strategy"]
    build(strategy, parse_options(params["option"] or [], where="--option"))
    return given


def require_a_study(script: Path, rest: Sequence[str], *, jobs_own: Sequence[str]) -> int:
    """Refuses what `paceline compare` would refuse at its start. Returns how many runs it has, each of which can be run
    alone."""
    from paceline.cli.compare import spec_of

    params, _ = _options("compare", script, rest, jobs_own=jobs_own)
    spec = spec_of(params)
    spec.at(1)
    return len(spec.trials)


def _options(
    command: str, script: Path, rest: Sequence[str], *, jobs_own: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that the command is to know, and what of it is given to it, by name."""
    context = commands.load(command).make_context(f"paceline {command}", [str(script), *rest])
    given = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is context.get_parameter_source("script")
    }
    for name in jobs_own:
        if name in given:
            raise UsageError(f"--{name} is the job's own; leave it out")
    return context.params, given
