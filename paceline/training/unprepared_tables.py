"""Refuses to train tables of rows that are part of no prepared model: nobody updates them, or each worker alone."""

from collections.abc import Callable, Iterable
from typing import final
from weakref import WeakKeyDictionary, WeakSet

from paceline.errors import UsageError
from paceline.hooks import Telling
from paceline.nn.sharded_embedding import ShardedEmbedding, watch

_REMEDY = (
    "make it an attribute of a module that prepare is given, or, if it is not to be trained, read it under "
    "torch.no_grad()"
)


@final
class UnpreparedTables:
    """
    Args:
        tables: those of prepared models.
        may_train_others: whether the script may train a table that was not prepared. With several workers each would
            have different rows.
        num_steps: how many steps prepared optimizers have taken. What a table is used for between two of them, as for
            an adversarial example, is that batch's.
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
        self._read_since: WeakKeyDictionary[ShardedEmbedding, int] = WeakKeyDictionary()
        self._updated_since: WeakKeyDictionary[ShardedEmbedding, int] = WeakKeyDictionary()
        watch.set(self)

    def close(self) -> None:
        watch.set(None)

    def reads(self, table: ShardedEmbedding) -> None:
        """Raises UsageError if the table has gradients of an earlier batch, which nobody has taken."""
        if table in self._prepared:
            return
        now = self._num_steps()
        if not table.has_gradients:
            self._read_since[table] = now
        elif self._read_since.setdefault(table, now) != now:
            self._refuse(table, "is read batch after batch, and nobody updates it by the gradients that are found")

    def updates(self, table: ShardedEmbedding) -> None:
        """Raises UsageError if this is not the first batch with an update, and other workers have the table, too."""
        if table in self._prepared or self._may_train_others():
            return
        now = self._num_steps()
        if self._updated_since.setdefault(table, now) != now:
            self._refuse(table, "is updated batch after batch by each worker alone")

    def _refuse(self, table: ShardedEmbedding, what: str) -> None:
        with self._tell:
            raise UsageError(
                f"rank {self._rank}: table {table.spec.name!r} is part of no prepared model, and {what}; {_REMEDY}"
            )
