"""A rank's loader of numbers, and what it told the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
)

from paceline.training.sharding import Part, Place, ShardedLoader


class Numbers(Dataset[Tensor]):
    """Sample i is the number i; a list of indices gives their batch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int | list[int]) -> Tensor:
        return torch.tensor(index)


class Watched:
    """A rank's loader, and what it told the session."""

    def __init__(self, loader: DataLoader[Any], *, rank: int = 0, size: int = 1, seed: int = 0) -> None:
        self.placed: list[tuple[int, float]] = []
        """Samples and weight of each batch."""
        self.positions = 0
        self.stop = False
        self.loader = ShardedLoader(
            loader,
            rank=rank,
            size=size,
            seed=seed,
            on_part=self._on_part,
            on_position=self._on_position,
            should_stop=lambda: self.stop,
        )

    def _on_part(self, part: Part, place: Place) -> None:
        self.placed.append((part.num_samples, part.weight))
        assert place == self.loader.place

    def _on_position(self) -> None:
        self.positions += 1

    def epoch(self) -> list[list[int]]:
        return [batch.view(-1).tolist() for batch in self.loader]


def ranks(make: Callable[[], DataLoader[Any]], size: int, *, seed: int = 0) -> list[Watched]:
    return [Watched(make(), rank=rank, size=size, seed=seed) for rank in range(size)]


def global_batches(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    """The k-th batches of all ranks together, in rank order."""
    return [[sample for batch in group for sample in batch] for group in zip(*of_ranks, strict=True)]
