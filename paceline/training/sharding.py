"""One epoch's batches divided among ranks: every sample once, and as many batches for every rank."""

import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.errors import BudgetReached, UsageError
from paceline.seeding import derive, preserved_random_state, seed_everything

_MAX_IDLE_EPOCHS = 1000


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of one global batch."""

    indices: tuple[int, ...]
    weight: float
    """This rank's share of the global batch, times the number of ranks; 1 where all have equally many samples."""


def share_out(batches: Sequence[Sequence[int]], *, rank: int, size: int, drop_last: bool = False) -> list[RankBatch]:
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
    groups.append([samples[start:stop] for start, stop in itertools.pairwise(bounds)])


@final
class ShardedLoader:
    """This rank's part of a map-style `DataLoader`, with its data set, collation and worker processes.

    The order of an epoch is drawn by the loader's own sampler from (seed, epoch), the same on every rank. Iterating
    ends early once `should_stop()` is true; after a resume the epochs already trained are empty, and the first one
    that is not starts where the checkpoint was taken. A script that leaves its loop early goes on with the next epoch.

    Args:
        on_return: called when the script comes back: for its next batch, or for a new epoch.
        on_batch: called with each batch's place before it is handed out.
        on_position: called once when the position to resume from is reached.

    A script's remaining epochs are empty after that; one that loops for ever is ended by `BudgetReached`.

    Raises:
        UsageError: the data set has no indices, the loader is already sharded, it is of a class with an iteration of
            its own, or it has no batch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        size: int,
        seed: int,
        on_return: Callable[[], None] = lambda: None,
        on_batch: Callable[[RankBatch], None],
        on_position: Callable[[], None],
        should_stop: Callable[[], bool],
    ) -> None:
        _refuse_unshardable(loader)
        self._loader = loader
        self._rank, self._size, self._seed = rank, size, seed
        self._on_return, self._should_stop = on_return, should_stop
        self._on_batch, self._on_position = on_batch, on_position
        self._inner_batches: list[tuple[int, ...]] = []
        self._inner = _rebuild(loader, self._inner_batches)
        self.epoch = 0
        """The epoch that the next batch belongs to."""
        self.num_batches_done = 0
        """Batches of that epoch already handed out."""
        self._resume_at: tuple[int, int] | None = None
        self._num_idle_epochs = 0
        self._length = len(self.batches(0))
        if self._length == 0:
            raise UsageError(f"the DataLoader has no batch for {size} worker(s): fewer samples than a global batch?")

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        """Everything else that a DataLoader has, as the script made it."""
        if "_loader" not in self.__dict__:  # copy and pickle look before there is anything
            raise AttributeError(name)
        return getattr(self._loader, name)

    def batches(self, epoch: int) -> list[RankBatch]:
        """This rank's batches of an epoch."""
        batch_sampler = _batch_sampler(self._loader)
        seed = derive(self._seed, "order", epoch)
        drawn = _plainly_drawn(batch_sampler, seed) if _is_plain(batch_sampler) else self._drawn(batch_sampler, seed)
        return share_out(drawn, rank=self._rank, size=self._size, drop_last=getattr(batch_sampler, "drop_last", False))

    def _drawn(self, batch_sampler: Any, seed: int) -> Sequence[Sequence[int]]:
        """What the script's own samplers draw."""
        with preserved_random_state():
            seed_everything(seed)
            for generator in _generators(self._loader):
                generator.manual_seed(seed)
            if batch_sampler is not None:
                return [list(batch) for batch in batch_sampler]
            drawn = [[index] for index in self._loader.sampler]
        if len(drawn) % self._size:
            raise UsageError(
                f"{len(drawn)} unbatched samples cannot be dealt out evenly to {self._size} workers; "
                "give the DataLoader a batch_size"
            )
        return drawn

    def resume_at(self, epoch: int, num_batches_done: int) -> None:
        """Skip to a checkpoint's position."""
        self._resume_at = (epoch, num_batches_done)

    def __iter__(self) -> Iterator[Any]:
        self._on_return()
        if self._should_stop():
            self._num_idle_epochs += 1
            if self._num_idle_epochs > _MAX_IDLE_EPOCHS:
                raise BudgetReached("the run has ended, and the script goes on asking for epochs")
            return
        if self._resume_at is not None and self.epoch < self._resume_at[0]:
            self.epoch += 1
            return
        batches = self.batches(self.epoch)
        position, self._resume_at = self._resume_at, None
        skipped = position[1] if position is not None else 0
        self._inner_batches[:] = [batch.indices for batch in batches[skipped:]]
        self.num_batches_done = skipped
        if position is not None and not skipped:
            self._on_position()
        inner = iter(self._inner)  # draws from the random state, as it did when the epoch was begun
        if position is not None and skipped:
            self._on_position()
        for batch, data in zip(batches[skipped:], inner, strict=True):
            self._on_batch(batch)
            self.num_batches_done += 1
            try:
                yield data
            except GeneratorExit:
                if not self._should_stop():
                    self._end_epoch()
                raise
            self._on_return()
            if self._should_stop():
                return
        self._end_epoch()

    def _end_epoch(self) -> None:
        self.epoch += 1
        self.num_batches_done = 0


def _refuse_unshardable(loader: DataLoader[Any]) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"prepare takes a torch DataLoader, not {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("an IterableDataset has no indices to divide among workers; use a map-style data set")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(f"{type(loader).__name__} iterates in a way of its own; use a plain DataLoader")
    if any(isinstance(sampler, DistributedSampler) for sampler in _samplers(loader)):
        raise UsageError("the DataLoader already has a DistributedSampler; prepare divides the data itself: remove it")


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """What draws the order of an epoch."""
    batch_sampler = _batch_sampler(loader)
    return [loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]


def _batch_sampler(loader: DataLoader[Any]) -> Any:
    """What draws whole batches: the loader's own, or a sampler that does so for a data set that fetches batches."""
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def _is_plain(batch_sampler: Any) -> bool:
    """Whether it is torch's own, over all samples once, so that its order depends on nothing but the random state."""
    if type(batch_sampler) is not BatchSampler:
        return False
    sampler: Any = batch_sampler.sampler
    if type(sampler) is RandomSampler:
        is_whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return is_whole and sampler.generator is None
    return type(sampler) is SequentialSampler


def _plainly_drawn(batch_sampler: BatchSampler, seed: int) -> Sequence[Sequence[int]]:
    sampler: Any = batch_sampler.sampler
    return _plain_batches(
        seed,
        is_shuffled=isinstance(sampler, RandomSampler),
        num_samples=len(sampler),
        batch_size=batch_sampler.batch_size,
        drop_last=batch_sampler.drop_last,
    )


# Virtual workers share a process, and so an epoch's order: drawing it takes 14 ms for 50,000 samples, for
# each of the workers.
@functools.lru_cache(maxsize=2)
def _plain_batches(
    seed: int, *, is_shuffled: bool, num_samples: int, batch_size: int, drop_last: bool
) -> "list[array[int]]":
    """What torch's samplers draw from this seed. Arrays, since they are kept, and take a quarter of a list's memory."""
    samples = range(num_samples)
    with preserved_random_state():
        seed_everything(seed)
        order = array("q", RandomSampler(samples) if is_shuffled else SequentialSampler(samples))
    end = num_samples - num_samples % batch_size if drop_last else num_samples
    return [order[start : min(start + batch_size, end)] for start in range(0, end, batch_size)]


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    found = [getattr(sampler, "generator", None) for sampler in _samplers(loader)]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


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
    whole = isinstance(loader.sampler, BatchSampler)
    sampler = _Batches(batches) if whole else _Singles(batches)
    return DataLoader(loader.dataset, batch_size=None, sampler=sampler, **common)


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
