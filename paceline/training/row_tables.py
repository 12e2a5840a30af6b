"""The tables of a run's model, whose rows are no parameters: how a script's calls and a run's files include them."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.nn.sharded_embedding import ShardedEmbedding
from paceline.strategies.replica import Replica
from paceline.training import snapshot
from paceline.training.worker_run import WorkerRun

ROWS_FILE = "rows.safetensors"


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
            "none for them; use ps-bsp, ps-ssp or ps-asp, or single with one worker"
        )
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise UsageError(f"two tables are called {twice!r}; give each ShardedEmbedding a name of its own")
    run.context.collective.require_equal("the list of the model's tables", [table.spec.plain() for table in tables])
    # A kept copy of the model would be judged with rows of a later moment.
    run.traits = replace(run.traits, shows_model=False)
    _drop_with(optimizer, tables)


def rows_of(replica: Replica) -> dict[str, dict[str, Tensor]]:
    """All rows, by the table's name, for a checkpoint."""
    return {table.spec.name: table.rows() for table in replica.tables}


def load_rows(replica: Replica, rows: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Go on with a checkpoint's rows. Collective call. Raises UsageError if it is of other tables."""
    own = {table.spec.name: table for table in replica.tables}
    for name in sorted(own.keys() ^ rows.keys()):
        raise UsageError(f"the checkpoint is of another model: only one of the two has the table {name!r}")
    for name, table in own.items():
        table.load_rows(rows[name])


def save_rows(run: WorkerRun) -> None:
    """Write the file of all rows beside the model's, where the names of a table's tensors have its own in front."""
    rows = rows_of(run.prepared.replica)
    if rows:
        named = {f"{table}.{name}": tensor for table, state in rows.items() for name, tensor in state.items()}
        run.reporter.save(ROWS_FILE, snapshot.as_model_file(named))


def _drop_with(optimizer: torch.optim.Optimizer, tables: Sequence[ShardedEmbedding]) -> None:
    """When the optimizer sets gradients to zero, those of rows go, too."""
    own: Callable[..., None] = optimizer.zero_grad

    def zero_grad(this: Any, set_to_none: bool = True) -> None:
        own(set_to_none=set_to_none)
        for table in tables:
            table.drop_gradients()

    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
