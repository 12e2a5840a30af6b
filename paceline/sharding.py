"""One epoch's batches divided among ranks: every sample once, and as many batches for every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from paceline.errors import UsageError
from paceline.seeding import derive, preserved_random_state, seed_everything


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of one global batch."""

    indices: tuple[int, ...]
    weight: float
    """This rank's share of the global batch, times the number of ranks; 1 where all have equally many samples."""


def divide(batches: Sequence[Sequence[int]], *, rank: int, size: int, drop_last: bool = False) -> list[RankBatch]:
    """Deal `batches` out in groups of `size`, rank r taking the r-th of each group.

    A last group that has too few batches, or a short one, is joined and divided evenly; with fewer samples than ranks
    it is joined to the group before it. So every rank has as many batches, and no rank an empty one. With `drop_last`
    such a group is dropped, as one process with the combined batch would drop it.

    Raises:
        UsageError: there are fewer samples than ranks.
    """
    groups = [list(batches[start : start + size]) for start in range(0, len(batches), size)]
    if groups and (len(groups[-1]) < size or len(groups[-1][-1]) < len(groups[-1][0])):
        if drop_last:
            groups.pop()
        else:
            _even_out(groups, size)
    divided: list[RankBatch] = []
    for group in groups:
        total = sum(len(batch) for batch in group)
        divided.append(RankBatch(tuple(group[rank]), len(group[rank]) * size / total))
    return divided


def _even_out(groups: list[list[Sequence[int]]], size: int) -> None:
    """Divide the last group's samples evenly, with those of the group before it if they are too few."""
    samples = [index for batch in groups.pop() for index in batch]
    if len(samples) < size and groups:
        samples = [index for batch in groups.pop() for index in batch] + samples
    if len(samples) < size:
        raise UsageError(f"{len(samples)} samples cannot be divided among {size} workers; use fewer workers")
    bounds = [len(samples) * part // size for part in range(size + 1)]
    groups.append([samples[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)])


@final
class ShardedLoader:
    """This rank's part of a map-style `DataLoader`, with its data set, collation and worker processes.

    The order of an epoch is drawn by the loader's own sampler from (seed, epoch), the same on every rank. Iterating
    ends early once `should_stop()` is true; after a resume the epochs already trained are empty, and the first one
    that is not starts where the checkpoint was taken.

    Args:
        on_batch: called with each batch's place before it is handed out.
        on_position: called once when the position to resume from is reached.

    Raises:
        UsageError: the data set has no indices, or the loader is already sharded.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        size: int,
        seed: int,
        on_batch: Callable[[RankBatch], None],
        on_position: Callable[[], None],
        should_stop: Callable[[], bool],
    ) -> None:
        _refuse_unshardable(loader)
        self._loader = loader
        self._rank, self._size, self._seed = rank, size, seed
        self._on_batch, self._on_position, self._should_stop = on_batch, on_position, should_stop
        self._inner_batches: list[tuple[int, ...]] = []
        self._inner = _rebuild(loader, self._inner_batches)
        self.epoch = 0
        """The epoch that the next batch belongs to."""
        self.num_batches_done = 0
        """Batches of that epoch already handed out."""
        self._resume_at: tuple[int, int] | None = None
        self._length = len(self.batches(0))

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        """Everything else that a DataLoader has, as the script made it."""
        return getattr(self.__dict__["_loader"], name)

    def batches(self, epoch: int) -> list[RankBatch]:
        """This rank's batches of an epoch."""
        with preserved_random_state():
            seed = derive(self._seed, "order", epoch)
            seed_everything(seed)
            generator = getattr(self._loader.sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            if self._loader.batch_sampler is not None:
                drawn = [list(batch) for batch in self._loader.batch_sampler]
            else:
                drawn = [[index] for index in self._loader.sampler]
                if len(drawn) % self._size:
                    raise UsageError(
                        f"{len(drawn)} unbatched samples cannot be dealt out evenly to {self._size} workers; "
                        "give the DataLoader a batch_size"
                    )
        return divide(drawn, rank=self._rank, size=self._size, drop_last=self._loader.drop_last)

    def resume_at(self, epoch: int, num_batches_done: int) -> None:
        """Skip to a checkpoint's position."""
        self._resume_at = (epoch, num_batches_done)

    def __iter__(self) -> Iterator[Any]:
        if self._should_stop():
            return
        if self._resume_at is not None and self.epoch < self._resume_at[0]:
            self.epoch += 1
            return
        batches = self.batches(self.epoch)
        skipped = 0
        if self._resume_at is not None:
            skipped = self._resume_at[1]
            self._resume_at = None
            self._on_position()
        self._inner_batches[:] = [batch.indices for batch in batches[skipped:]]
        self.num_batches_done = skipped
        for batch, data in zip(batches[skipped:], self._inner, strict=True):
            self._on_batch(batch)
            self.num_batches_done += 1
            yield data
            if self._should_stop():
                return
        self.epoch += 1
        self.num_batches_done = 0


def _refuse_unshardable(loader: DataLoader[Any]) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"prepare takes a torch DataLoader, not {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("an IterableDataset has no indices to divide among workers; use a map-style data set")
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError("the DataLoader already has a DistributedSampler; prepare divides the data itself: remove it")


def _rebuild(loader: DataLoader[Any], batches: list[tuple[int, ...]]) -> DataLoader[Any]:
    """The same loader over `batches`, a list that is filled anew for every epoch."""
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
        workers["multiprocessing_context"] = loader.multiprocessing_context
    common: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        **workers,
    }
    if loader.batch_sampler is not None:
        return DataLoader(loader.dataset, batch_sampler=_Batches(batches), **common)
    return DataLoader(loader.dataset, batch_size=None, sampler=_Singles(batches), **common)


@dataclass(frozen=True)
class _Batches:
    lists: list[tuple[int, ...]]

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(indices) for indices in self.lists])

    def __len__(self) -> int:
        return len(self.lists)


@dataclass(frozen=True)
class _Singles:
    lists: list[tuple[int, ...]]

    def __iter__(self) -> Iterator[int]:
        return iter([indices[0] for indices in self.lists])

    def __len__(self) -> int:
        return len(self.lists)
