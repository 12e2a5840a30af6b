"""Refuses tables of rows that are part of no prepared model, which nobody updates, or each worker alone."""

from collections.abc import Callable, Iterable
from typing import final
from weakref import WeakKeyDictionary, WeakSet

from paceline.errors import UsageError
from paceline.hooks import Telling
from paceline.nn.sharded_embedding import ShardedEmbedding, look_at


@final
class UnpreparedTables:
    """
    Args:
        tables: those of prepared models.
        may_train_others: whether the script may update another one by itself from one batch to the next, which on other
            workers would become another. What it reads for one batch alone is the batch's.
        num_steps: how many steps prepared optimizers have taken.
    """

    def __init__(
        self,
        tables: Iterable[ShardedEmbedding],
        *,
        rank: int,
        may_train_others: Callable[[], bool],
        num_steps: Callable[[], int],
    ) -> None:
        self._prepared = WeakSet(tables)
        self._rank, self._may_train_others, self._num_steps, self._tell = rank, may_train_others, num_steps, Telling()
        self._first_steps: WeakKeyDictionary[ShardedEmbedding, int] = WeakKeyDictionary()
        look_at.set(self._look)

    def close(self) -> None:
        look_at.set(None)

    def _look(self, table: ShardedEmbedding) -> None:
        """Raises UsageError if the table is of no prepared model, and this is not its first batch."""
        if table in self._prepared:
            return
        now = self._num_steps()
        if self._first_steps.setdefault(table, now) == now:
            return
        is_updated = not table.has_gradients
        if is_updated and self._may_train_others():
            return
        who = "each worker would update it alone" if is_updated else "nobody updates it"
        with self._tell:
            raise UsageError(
                f"rank {self._rank}: table {table.spec.name!r} is read batch after batch in order to train, and is "
                f"part of no prepared model, so {who}; make it an attribute of a module that prepare is given"
            )
