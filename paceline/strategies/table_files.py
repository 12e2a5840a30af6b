"""The options that have servers keep the rows of tables in files, under each strategy that has such servers."""

from pathlib import Path

from paceline.errors import UsageError
from paceline.server.tables.storage import TableFiles

DEFAULT_TABLE_MBYTES = 1024.0
DIR_DOC = "directory on each server's host, in whose files the rows of tables lie, instead of in memory"
MBYTES_DOC = f"of these files, what a server has in its memory at a time (default {DEFAULT_TABLE_MBYTES:g})"


def require_table_files(table_dir: str | None, table_mbytes: float | None) -> None:
    """Raises UsageError, which names the option, for a value that is out of range or has no effect."""
    if table_dir is not None and not Path(table_dir).is_absolute():
        raise UsageError(f"table_dir must be an absolute path, since it is on the servers' hosts: {table_dir}")
    if table_mbytes is not None and not (table_dir and table_mbytes > 0):
        raise UsageError(f"table_mbytes={table_mbytes:g} must be above 0, and needs table_dir=DIR")


def table_files(table_dir: str | None, table_mbytes: float | None, *, num_copies: int = 0) -> TableFiles | None:
    """What the options ask for; none: rows lie in memory. Copies of others' rows share it with a server's own."""
    if table_dir is None:
        return None
    return TableFiles(table_dir, int((table_mbytes or DEFAULT_TABLE_MBYTES) * 1e6 / (1 + num_copies)))
