"""Rows of tables on servers that hold nothing else, under a strategy whose workers own the model."""

import math
from typing import Literal, final, get_args

import torch

from paceline.aggregate import MEAN, Aggregator
from paceline.comm.base import Timing
from paceline.errors import UsageError
from paceline.layout import ALIGNMENT_BYTES, by_group
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.spec import OptimizerSpec, Push
from paceline.strategies.base import Context, NonFinitePolicy, non_finite, require_choice
from paceline.strategies.finite import nonfinite_row
from paceline.strategies.replica import Replica
from paceline.strategies.served_rows import ServedRows, keeping_for, require_row_staleness

RowRule = Literal["bsp", "asp"]
ROWS_DOC = (
    "of rows on servers: bsp, one update a step with the mean of all workers' gradients; asp, each worker's "
    "gradients are an update, for which nobody waits (default bsp)"
)
SERVERS_DOC = "number of servers that hold the rows of tables (ShardedEmbedding), and nothing else"
_NO_OPTIMIZER = OptimizerSpec(torch.optim.SGD, {"lr": 0.0}, ({},), element_wise=True)


def require_rows_beside(
    servers: int, rows: RowRule | None, table_dir: str | None, row_staleness: int, aggregate: Aggregator
) -> None:
    """Raises UsageError, which names the option, for a value that is out of range or has no effect."""
    if servers < 0:
        raise UsageError(f"servers must be at least 0, not {servers}")
    require_choice("rows", rows, (None, *get_args(RowRule)))
    if not servers and (rows or table_dir):
        raise UsageError(f"{f'rows={rows}' if rows else f'table_dir={table_dir}'} has no effect without servers=N")
    require_row_staleness(row_staleness, staleness=math.inf if rows == "asp" else None, rule="rows=bsp")
    if servers and aggregate != MEAN:
        raise UsageError(
            f"aggregate={aggregate} does not join the rows of a ShardedEmbedding, of which servers take the mean"
        )


def rule_of(rows: RowRule | None, members: Membership) -> AdmissionRule:
    return StaleSynchronous(members) if rows == "asp" else BulkSynchronous(members)


@final
class RowsBeside:
    """One worker's half. Collective call.

    The servers' shards are empty: a push of theirs says that the rows' gradients which came ahead of it are due, and
    is answered as the rule has it.

    Raises:
        UsageError: there are no servers, or no tables.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        *,
        rows: RowRule | None,
        row_staleness: int,
        nonfinite: NonFinitePolicy,
    ) -> None:
        if context.store is None:
            raise UsageError("this world has no servers; start the script with `paceline run ... --option servers=N`")
        if not replica.tables:
            raise UsageError(
                "servers hold the rows of tables here, and the model has no ShardedEmbedding; leave out servers, or "
                "use ps-bsp, ps-ssp or ps-asp"
            )
        self._context, self._store, self._tables = context, context.store, replica.tables
        self._is_joint, self._nonfinite, self._weight = rows != "asp", nonfinite, 1.0
        memory = self._store.allocate(ALIGNMENT_BYTES)
        self._store.attach(by_group(()), _NO_OPTIMIZER, memory, memory, holds_rows=True)
        keeping = keeping_for(row_staleness, staleness=math.inf)
        self._rows = ServedRows(context, self._store, self._tables, keeping=keeping)

    @property
    def timing(self) -> Timing:
        return self._store.timing

    def set_weight(self, weight: float) -> None:
        if self._is_joint and weight != self._weight:
            for table in self._tables:
                table.rescale_gradients(self._weight / weight)
        self._weight = weight

    def is_nonfinite(self, *, step: int) -> bool:
        """Whether all leave the step out, since some worker has a gradient of rows that is not finite. Raises
        NonFiniteGradient if that is this worker and the option says so."""
        if self._nonfinite == "allow":
            return False
        row = nonfinite_row(self._tables)
        if self._nonfinite == "skip":
            return True in self._context.collective.all_gather_object(row is not None)
        if row is not None:
            raise non_finite(rank=self._context.rank, step=step, parameter=row)
        return False

    def push(self, *, is_void: bool, pause_at: int) -> None:
        """The step's gradients become an update as the rule has it, or are dropped, on all workers alike."""
        self._rows.push(weight=self._weight, is_void=is_void, are_finite=self._nonfinite != "allow")
        self._store.exchange(Push(pause_at=pause_at, void=is_void))

    def leave(self) -> None:
        self._store.leave()
        self._rows.leave()
