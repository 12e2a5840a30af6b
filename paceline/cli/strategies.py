"""`paceline strategies`: every strategy with its options."""

from rich.console import Console
from rich.table import Table

from paceline.strategies import STRATEGIES


def strategies() -> None:
    """List every strategy with its options, one line each."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for entry in STRATEGIES.values():
        table.add_row(f"[bold]{entry.name}[/]", entry.summary)
        if entry.is_another_name:
            continue
        for name, (default, doc) in entry.docs.items():
            shown = "" if default is None else f" [dim](default {default})[/]"
            table.add_row(f"  [cyan]{name}[/]", f"  {doc}{shown}")
    Console().print(table)
