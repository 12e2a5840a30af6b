"""A worker's way to the rows of a run's tables, whose servers it asks as `ServerGroup` does."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

from torch import Tensor

from paceline.comm.base import Collective, TableStore, Timing
from paceline.comm.servers.carrier import Carrier
from paceline.row_file import RowFile
from paceline.server.server_core import Send
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.spec import RowGradients, TableSpec


@final
class ServedTables(TableStore):
    """
    Args:
        timing: of the store, which what this takes is added to.
    """

    def __init__(
        self, carrier: Carrier, specs: Sequence[TableSpec], *, collective: Collective, timing: Timing, epoch: int
    ) -> None:
        self._carrier, self._collective, self._timing = carrier, collective, timing
        self._client = TableClient(specs, rank=collective.rank, epoch=epoch, num_servers=len(carrier.beside))
        if collective.rank == 0:
            self._ask(self._client.open())
        collective.barrier()

    def read(self, table: int, keys: Tensor) -> Tensor:
        sends = self._client.read(table, keys)
        if sends:  # there is a key
            self._timed(sends)
        return self._client.rows()

    def push(self, gradients: Sequence[RowGradients | None], *, weight: float) -> None:
        self._timed(self._client.push(gradients, weight=weight))

    def state(self, table: int) -> dict[str, Tensor]:
        self._ask(self._client.get_state(table))
        return self._client.state()

    def load(self, table: int, state: Mapping[str, Tensor]) -> None:
        if self._collective.rank == 0:
            self._ask(self._client.set_state(table, state))
        self._collective.barrier()

    def save(self, table: int, directory: Path) -> list[RowFile]:
        self._ask(self._client.save(table, directory))
        return self._client.saved()

    def load_files(self, table: int, directory: Path, files: Sequence[RowFile]) -> None:
        if self._collective.rank == 0:
            self._ask(self._client.load(table, directory, files))
        self._collective.barrier()

    def _timed(self, sends: Iterable[Send]) -> None:
        self._timing.communication_s += self._ask(sends)
        self._timing.moved_bytes += self._client.moved_bytes

    def _ask(self, sends: Iterable[Send]) -> float:
        """Ask, and wait; the seconds that took."""
        elapsed_s = self._carrier.carry(self._client, sends)
        self._client.require_done()
        return elapsed_s
