"""A table of a few rows, updates of it, and the workers and servers that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.messages import Kind, Message, WireError
from paceline.row_file import RowFile
from paceline.server.closing import Applied
from paceline.server.tables.changes import Changes
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.shards import TableShards
from paceline.server.tables.spec import RowGradients, TableSpec

NUM_ROWS, DIM = 12, 3
KEYS = st.integers(0, 2**63 - 1)
SIZES = st.sampled_from([NUM_ROWS, 2**60])
"""Rows of a table that has its keys listed, and of one that has them hashed."""
BATCHES = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=8), min_size=1, max_size=6)


def spec_of(optimizer: str = "adagrad:lr=0.1", **settings: Any) -> TableSpec:
    given = {"num_rows": NUM_ROWS, "dim": DIM, "seed": 4, "dtype": torch.float64, **settings}
    return TableSpec(name="users", optimizer=of_text(optimizer), **given)


def gradients_of(keys: Sequence[int], seed: int) -> RowGradients:
    """One for each key, however often it comes."""
    unique = torch.tensor(sorted(set(keys)), dtype=torch.int64)
    values = torch.randn(len(unique), DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return RowGradients(unique, values)


class Net:
    """Workers and servers of one table. Messages are encoded and decoded."""

    def __init__(self, spec: TableSpec, *, num_servers: int, num_workers: int = 1) -> None:
        self.servers = [TableShards() for _ in range(num_servers)]
        self.clients = [TableClient([spec], rank=rank, epoch=1, num_servers=num_servers) for rank in range(num_workers)]
        self.num_updates = 0
        self.ask(0, self.clients[0].open())

    def read(self, keys: Sequence[int], worker: int = 0) -> Tensor:
        self.ask(worker, self.clients[worker].read({0: torch.tensor(list(keys))}))
        return self.clients[worker].rows()[0]

    def changed(self, worker: int, *, looks: bool = False) -> Changes:
        self.ask(worker, self.clients[worker].changed([0], looks=looks))
        return self.clients[worker].changes()[0]

    def push(self, worker: int, weight: float, gradients: RowGradients | None) -> None:
        self.ask(worker, self.clients[worker].push([gradients], weight=weight, clock=self.num_updates))

    def update(self, contributions: dict[int, tuple[float, RowGradients | None]]) -> None:
        """One update of what these workers push."""
        for worker, (weight, gradients) in contributions.items():
            self.push(worker, weight, gradients)
        clock, self.num_updates = self.num_updates, self.num_updates + 1
        for server in self.servers:
            server.update([Applied(self.num_updates, worker, clock, 0) for worker in contributions])

    def state(self) -> dict[str, Tensor]:
        self.ask(0, self.clients[0].get_state(0))
        return self.clients[0].state()

    def counts(self) -> dict[str, int]:
        self.ask(0, self.clients[0].show())
        return self.clients[0].counts(0)

    def load(self, state: dict[str, Tensor]) -> None:
        self.ask(0, self.clients[0].set_state(0, state))

    def save(self, directory: Path) -> list[RowFile]:
        self.ask(0, self.clients[0].save(0, directory))
        return self.clients[0].saved()

    def load_files(self, directory: Path, files: list[RowFile]) -> None:
        self.ask(0, self.clients[0].load(0, directory, files))

    def ask(self, worker: int, sends: Any) -> None:
        client = self.clients[worker]
        for server, message in sends:
            request = Message.decode([bytes(frame) for frame in message.encode()], epoch=1)
            assert request.tensor_bytes == sum(map(len, request.payload))
            try:
                answer = Message(Kind.OK, 1, **self.servers[server].receive(request))
            except WireError as error:
                answer = Message(Kind.ERROR, 1, body={"error": str(error)})
            assert not list(client.receive(server, answer))
        assert client.is_done
        client.require_done()
