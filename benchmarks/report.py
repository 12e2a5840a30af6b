"""How a benchmark tells what it measured: tables to read, then the same with every number as one line of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.running.manifest import describe_machine

TABLE_WIDTH = 120


def tell(tables: Sequence[Table], facts: Mapping[str, Any]) -> None:
    """Print the tables, and `facts` with the tables and the machine."""
    console = Console(width=TABLE_WIDTH)
    for table in tables:
        console.print(table)
    machine = describe_machine() | {"torch": torch.__version__}
    print(json.dumps({"machine": machine, **facts, "tables": [_as_json(table) for table in tables]}))


def load_average() -> str:
    """Of the last 1, 5 and 15 minutes."""
    return ", ".join(f"{each:.1f}" for each in os.getloadavg())


def markdown(table: Mapping[str, Any]) -> str:
    """A table of such a line, as Markdown."""
    rule = ["--:" if is_number else "---" for is_number in table["is_number"]]
    rows = [table["columns"], rule, *table["rows"]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"{table['title']}:", "", *lines] if table["title"] else lines)


def _as_json(table: Table) -> dict[str, Any]:
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return {
        "title": str(table.title or ""),
        "columns": [str(column.header) for column in table.columns],
        "is_number": [column.justify == "right" for column in table.columns],
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }
