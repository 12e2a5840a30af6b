"""The tables of a run's model, whose rows are no parameters: how a script's calls and a run's files include them."""

import secrets
import shutil
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.checkpoint import Checkpoint
from paceline.errors import NotWritten, UsageError
from paceline.nn.sharded_embedding import ShardedEmbedding
from paceline.row_file import RowFile
from paceline.strategies.replica import Replica
from paceline.training import snapshot
from paceline.training.worker_run import WorkerRun

ROWS_FILE = "rows.safetensors"


class Written(NamedTuple):
    """What servers have written themselves, and a checkpoint names."""

    directory: str
    files: dict[str, list[RowFile]]
    """By the table's name."""


NOTHING = Written("", {})
"""What a checkpoint without rows has of them."""


def take_in(run: WorkerRun, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """Have the run include the model's tables.

    Raises:
        UsageError: the strategy has no place for their rows, or two have the same name.
    """
    tables = replica.tables
    if not tables:
        return
    names = [table.spec.name for table in tables]
    if not run.traits.holds_rows:
        raise UsageError(
            f"the rows of table {names[0]!r} (ShardedEmbedding) lie on servers, and {type(run.strategy).__name__} has "
            "none for them; use ps-bsp, ps-ssp or ps-asp, all-reduce with servers=1 or more, or single with one worker"
        )
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise UsageError(f"two tables are called {twice!r}; give each ShardedEmbedding a name of its own")
    run.context.collective.require_equal("the list of the model's tables", [table.spec.plain() for table in tables])
    # A kept copy of the model would be judged with rows of a later moment.
    run.traits = replace(run.traits, shows_model=False)
    _drop_with(optimizer, tables)


def require_none_since(replica: Replica) -> None:
    """Raises UsageError if the model has a table that it did not have when it was prepared: nobody would update it."""
    known = set(map(id, replica.tables))
    for module in replica.model.modules():
        if isinstance(module, ShardedEmbedding) and id(module) not in known:
            raise UsageError(
                f"the model has got table {module.spec.name!r} after prepare, so that its rows would stay what they "
                "are; make it before"
            )


def rows_of(run: WorkerRun) -> dict[str, dict[str, Tensor]]:
    """All rows, by the table's name."""
    return {table.spec.name: table.rows() for table in run.prepared.replica.tables}


def write_rows(run: WorkerRun) -> Written | None:
    """Have servers that have the rows in files write them beside the checkpoint that is made; none: they have not.
    Raises NotWritten."""
    if not _are_in_files(run):
        return None
    tables, directory = run.prepared.replica.tables, Path(run.config.directory or "")
    name = f"rows-{run.iteration}-{secrets.token_hex(4)}"
    try:
        return Written(name, {table.spec.name: table.save_files(directory / name) for table in tables})
    except NotWritten:
        shutil.rmtree(directory / name, ignore_errors=True)  # no checkpoint comes of these
        raise


def load_rows(run: WorkerRun, checkpoint: Checkpoint) -> None:
    """Go on with a checkpoint's rows. Collective call. Raises UsageError if it is of other tables."""
    own = {table.spec.name: table for table in run.prepared.replica.tables}
    for name in sorted(own.keys() ^ (checkpoint.rows.keys() | checkpoint.row_files.keys())):
        raise UsageError(f"the checkpoint is of another model: only one of the two has the table {name!r}")
    for name, table in own.items():
        if name in checkpoint.rows:
            table.load_rows(checkpoint.rows[name])
        else:
            directory = Path(run.config.resumed_from or "", checkpoint.rows_directory)
            table.load_files(directory, checkpoint.row_files[name])


def save_rows(run: WorkerRun) -> None:
    """Write the file of all rows beside the model's, where the names of a table's tensors have its own in front; not of
    servers that have rows in files, which might be too many. How many there are is an event."""
    tables = run.prepared.replica.tables
    if tables:
        run.tell("rows", {table.spec.name: table.counts() for table in tables})
    rows = {} if _are_in_files(run) else rows_of(run)
    if rows:
        named = {f"{table}.{name}": tensor for table, state in rows.items() for name, tensor in state.items()}
        run.reporter.save(ROWS_FILE, snapshot.as_model_file(named))


def _are_in_files(run: WorkerRun) -> bool:
    """Whether servers have the rows in files, and the run a directory where they can write them."""
    return bool(run.prepared.replica.tables) and None not in (run.strategy.table_files(), run.config.directory)


def _drop_with(optimizer: torch.optim.Optimizer, tables: Sequence[ShardedEmbedding]) -> None:
    """When the optimizer sets gradients to zero, those of rows go, too."""
    own: Callable[..., None] = optimizer.zero_grad

    def zero_grad(this: Any, set_to_none: bool = True) -> None:
        own(set_to_none=set_to_none)
        for table in tables:
            table.drop_gradients()

    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
