"""The naive twin of a run: the same script in one plain process, which trains on the workers' combined batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from paceline.seeding import derive
from paceline.training.given import told_apart
from paceline.training.sharding import ShardedLoader

Script = Callable[[Any], nn.Module]
"""Trains with what it is given as its worker, which is Paceline's or a `Reference`, and returns its model."""


@final
class Reference:
    """Stands where a script has its worker; exchanges nothing and changes nothing.

    Args:
        num_workers: whose batches are combined.
        seed: of the run that is compared.
    """

    rank, size, device = 0, 1, torch.device("cpu")

    def __init__(self, num_workers: int, *, seed: int = 0) -> None:
        self.num_workers, self._seed = num_workers, seed

    def prepare(self, *given: Any, **named: Any) -> tuple[Any, ...]:
        found = told_apart(given, named)
        loaders = [self._combined(loader, index) for index, loader in enumerate(found.loaders.values())]
        back = found.models | found.optimizers | dict(zip(found.loaders, loaders, strict=True))
        return tuple(back[name] for name in found.names)

    def _combined(self, loader: DataLoader[Any], index: int) -> _CombinedBatches | DataLoader[Any]:
        if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.sampler, Sized):
            assert loader.batch_size is not None
            sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
            combined = self.num_workers * loader.batch_size
            return DataLoader(loader.dataset, batch_size=combined, sampler=sampler)
        return _CombinedBatches(loader, self.num_workers, derive(self._seed, "data", index) if index else self._seed)

    def evaluation(self, function: Any) -> Any:
        return function

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def log(self, **metrics: Any) -> None:
        pass


@final
class _CombinedBatches:
    """Global batches, epoch after epoch, in the order in which the workers have their parts."""

    def __init__(self, loader: DataLoader[Any], num_workers: int, seed: int) -> None:
        self._loader, self._epoch = loader, 0
        self._parts = [part_of(loader, rank, num_workers, seed) for rank in range(num_workers)]

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for parts in zip(*(part.batches(epoch) for part in self._parts), strict=True):
            indices = [index for part in parts for index in part.samples]
            fetch = getattr(self._loader.dataset, "__getitems__", lambda some: [self._loader.dataset[i] for i in some])
            yield self._loader.collate_fn(fetch(indices))

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getattr__(self, name: str) -> Any:
        """Everything else that the script's own loader has."""
        return getattr(self._loader, name)


def part_of(loader: DataLoader[Any], rank: int, num_workers: int, seed: int) -> ShardedLoader:
    """One worker's part of the data."""
    return ShardedLoader(loader, rank=rank, size=num_workers, seed=seed)


@functools.cache
def train_alone(script: Script, num_workers: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """The final state of the script's model in one process with the batches of `num_workers`, computed once."""
    torch.manual_seed(seed)
    model = script(Reference(num_workers, seed=seed))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
