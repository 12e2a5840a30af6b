"""`paceline strategies`: every strategy with its options; and topologies, drawn."""

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline import pieces
from paceline.errors import UsageError
from paceline.lab import words
from paceline.strategies import STRATEGIES
from paceline.topology import Topology

_ALL = "all"
_NOTHING = 1e-9
"""A smaller share of a distance is rounding."""
_MOST_STEPS = 16
"""How many steps a picture shows."""


def strategies(
    topology: Annotated[
        str | None, typer.Option(help="Show this one instead, or all side by side.", metavar="NAME|all")
    ] = None,
    workers: Annotated[int, typer.Option(help="Of the topology.", min=1)] = 8,
) -> None:
    """List every strategy with its options, one line each; or show with whom workers exchange under a topology.

    Example: paceline strategies --topology torus:rows=2 --workers 8
    """
    console = Console()
    if topology is None:
        console.print(_list())
    elif topology == _ALL:
        console.print(_comparison(workers))
    else:
        try:
            told = _told(pieces.read(Topology, topology), workers)  # type: ignore[type-abstract]
        except ValueError as error:
            raise UsageError(str(error)) from None
        console.print(told, markup=False, highlight=False, soft_wrap=True)


def _list() -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for entry in STRATEGIES.values():
        table.add_row(f"[bold]{entry.name}[/]", entry.summary)
        if entry.is_another_name:
            continue
        for name, (default, doc) in entry.docs.items():
            shown = "" if default is None else f" [dim](default {default})[/]"
            table.add_row(f"  [cyan]{name}[/]", f"  {doc}{shown}")
    return table


def _comparison(workers: int) -> Table:
    """A table of every topology that needs no option, and is one of so many workers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for heading in ("topology", "repeats after", "models sent a step", "distance kept", "a step"):
        table.add_column(heading, justify="left" if heading == "topology" else "right")
    for name in pieces.named(Topology):  # type: ignore[type-abstract]
        try:
            found = pieces.read(Topology, name)  # type: ignore[type-abstract]
            contraction, period = found.contraction(workers), found.period(workers)
        except (UsageError, ValueError):  # it needs an option, or another number of workers
            continue
        kept = "0" if contraction < _NOTHING else words.quantity(contraction)
        each = "-" if contraction < _NOTHING else words.quantity(contraction ** (1 / period))
        table.add_row(name, str(period), words.quantity(found.num_sent(workers)[0]), kept, each)
    return table


def _told(topology: Topology, workers: int) -> str:
    period, contraction = topology.period(workers), topology.contraction(workers)
    mean, most = topology.num_sent(workers)
    after = "a step" if period == 1 else f"{period} steps"
    lines = [
        f"{topology}, {words.workers(workers)}",
        f"A worker sends {words.quantity(mean)} models a step, and at most {most}.",
        f"After {after} the distance to the mean is {max(0.0, contraction):.4f} of what it was; "
        f"the spectral gap is {topology.spectral_gap(workers):.4f}.",
    ]
    if period > 1 and contraction > _NOTHING:
        lines.append(f"That is {contraction ** (1 / period):.4f} a step.")
    for step in range(min(period, _MOST_STEPS)):
        lines += ["", f"Step {step + 1}:" if period > 1 else "Every step:", topology.drawing(step, workers)]
    if period > _MOST_STEPS:
        lines += ["", f"... and {period - _MOST_STEPS} more, before they repeat."]
    return "\n".join(lines)
