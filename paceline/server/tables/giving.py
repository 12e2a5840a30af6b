"""All rows of a server's tables go to a server that gets a copy of them: some at a time, while updates go on.

Whatever goes is what keys have just then: rows, what their optimizer keeps, and counts of those that wait for a row. In
between, each update's keys go as the update leaves them, however many updates there are. So the copy has, once all
pieces have come in this order, what is here, and no update counts in it twice.

Keys go from the last slot down. A key that comes meanwhile is an update's; one that gets the slot of another that goes
gets a lower one, and is still to come, or has gone already.
"""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.server.tables.table import Table

PIECE_BYTES = 1 << 20
"""Of rows that go at a time."""


@final
class Giving:
    """From here on the tables note what changes, until `close`.

    Tensors have the names of a table's (`Table.states`), behind its number and a dot.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._left = [(number, *begin) for number, table in enumerate(tables) for begin in table.groups()]
        for table in tables:
            table.follow()

    def changes(self) -> dict[str, Tensor]:
        """What has changed since this was called last, and how far the tables are."""
        return self._states({number: table.take_changed() for number, table in enumerate(self._tables)})

    def piece(self) -> dict[str, Tensor] | None:
        """Some more of what was there at the beginning; none: all of it has gone."""
        while self._left:
            number, group, stop = self._left.pop()
            keys, begin = self._tables[number].some_keys(group, stop, num_bytes=PIECE_BYTES)
            if begin:
                self._left.append((number, group, begin))
            if len(keys):
                return self._states({number: keys})
        return None

    def close(self) -> None:
        for table in self._tables:
            table.follow(on=False)

    def _states(self, keys: Mapping[int, Tensor]) -> dict[str, Tensor]:
        nothing = torch.empty(0, dtype=torch.int64)
        return {
            f"{number}.{name}": tensor
            for number, table in enumerate(self._tables)
            for name, tensor in table.states(keys.get(number, nothing)).items()
        }
