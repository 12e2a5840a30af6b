"""`paceline migrate`: what turns a script of Horovod's into one of Paceline's."""

import difflib
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError


def migrate(
    script: Annotated[Path, typer.Argument(help="A script that imports horovod.torch.", show_default=False)],
) -> None:
    """Print the diff that turns a script of Horovod's into Paceline's three lines. The script stays as it is.

    Example: paceline migrate legacy.py > legacy.diff; patch < legacy.diff
    """
    from paceline.horovod.migration import migrate as migrated

    try:
        source = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the script {script}: {error}") from None
    found = migrated(source)
    old, new = source.splitlines(keepends=True), found.source.splitlines(keepends=True)
    typer.echo("".join(difflib.unified_diff(old, new, str(script), str(script))), nl=False)
    for note in found.notes:
        typer.echo(f"{script}:{note.line}: {note.text}" if note.line else f"{script}: {note.text}", err=True)
