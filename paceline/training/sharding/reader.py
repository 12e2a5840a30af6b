"""Reads a stream in a loader worker, or in the script's own process, and takes this rank's part of it."""

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.seeding import derive, preserved_random_state, seed_everything
from paceline.training.sharding.contents import digest_of, num_samples_in
from paceline.training.sharding.division import share_out
from paceline.training.sharding.part import Part, Place


@final
class Reader(IterableDataset[Part]):
    """What the inner loader iterates: this rank's parts, already collated.

    In loader workers a data set that does not split itself is told that there is one: so it yields everything, and each
    of them takes the groups that are its turn.

    Args:
        is_split: the data set yields this rank's samples alone, and in each loader worker its share of them.
        seed: of all random numbers that the data set draws; the same on all ranks that read the same stream.
    """

    def __init__(self, loader: DataLoader[Any], *, rank: int, size: int, is_split: bool, seed: int) -> None:
        self.dataset: Any = loader.dataset
        self._batch_size, self._drop_last, self._collate = loader.batch_size, loader.drop_last, loader.collate_fn
        self._init_worker = loader.worker_init_fn
        self._rank, self._size, self._is_split, self._seed = rank, size, is_split, seed
        self._worker: tuple[int, int] | None = None
        # Shared, since persistent loader workers keep their copy of this object from epoch to epoch.
        self._begin_at = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._restored = Place(0, 0)

    def begin(self, place: Place) -> None:
        """Where the next iteration begins."""
        self._begin_at[0], self._begin_at[1] = place.epoch, place.num_batches_done
        self._restored = place

    def enter(self, info: Any) -> None:
        """This process is a loader worker."""
        self._worker = info.id, info.num_workers
        seen: dict[str, Any] = {"id": info.id, "num_workers": info.num_workers, "seed": info.seed}
        if not self._is_split:
            seen = {"id": 0, "num_workers": 1, "seed": self._seed}
        torch.utils.data._utils.worker._worker_info = type(info)(**seen, dataset=self.dataset)
        if self._init_worker is not None:
            self._init_worker(seen["id"])

    def __iter__(self) -> Iterator[Part]:
        epoch, first = self._begin_at.tolist()
        worker, num_workers = self._worker or (0, 1)
        seed = derive(self._seed, epoch, worker if self._is_split else 0)
        has_state = self._restored.state is not None and self._restored[:2] == (epoch, first)
        if has_state:
            self.dataset.load_state_dict(self._restored.state)
        start = first if has_state else 0
        drawing = _Drawing(self.dataset, self._batch_size, self._drop_last, size=self._size, seed=seed)
        drop_last = self._drop_last or self._batch_size is None
        parts = share_out(drawing.batches(start), rank=self._rank, size=self._size, drop_last=drop_last)
        for number in itertools.count(start):
            with self._apart():
                batch = next(parts, None)
            if batch is None:
                return
            state = drawing.take_state()
            if number < first or (not self._is_split and (number - first) % num_workers != worker):
                continue
            if self._worker is not None:
                seed_everything(derive(seed, "collate", self._rank, number))
            samples = list(batch.samples)
            data = self._collate(samples if self._batch_size is not None else samples[0])
            num_samples = len(samples) if self._batch_size is not None else num_samples_in(data)
            yield Part(data, num_samples, batch.weight, drawing.digest if number == first else None, state)

    def _apart(self) -> AbstractContextManager[None]:
        """What the data set draws at random in the script's own process is not to move the script's generators."""
        return preserved_random_state() if self._worker is None else nullcontext()


def enter_worker(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.enter(info)


@final
class _Drawing:
    """One pass over the data set, which can be taken up at any group: each has its own seed."""

    def __init__(self, dataset: Any, batch_size: int | None, drop_last: bool, *, size: int, seed: int) -> None:
        self._dataset, self._batch_size, self._drop_last = dataset, batch_size or 1, drop_last
        self._size, self._seed = size, seed
        self._states: deque[Any] = deque()
        self._is_over = False
        self.digest: str | None = None
        """The digest of the first group, where ranks share a stream."""

    def batches(self, start: int) -> Iterator[list[Any]]:
        """All ranks' batches from the group `start` on, which is where the data set is."""
        samples: Iterator[Any] | None = None
        for group in itertools.count(start):
            seed_everything(derive(self._seed, group))
            samples = iter(self._dataset) if samples is None else samples
            drawn: list[list[Any]] = []
            for _ in range(self._size):
                drawn.append(list(itertools.islice(samples, self._batch_size)))
                self._is_over = len(drawn[-1]) < self._batch_size
                if self._is_over:
                    break
            if group == start and self._size > 1:
                self.digest = digest_of(drawn)
            if self._is_over and (self._drop_last or not drawn[-1]):
                drawn.pop()
            elif not self._is_over and hasattr(self._dataset, "load_state_dict"):
                self._states.append(self._dataset.state_dict())
            yield from drawn
            if self._is_over:
                return

    def take_state(self) -> Any:
        """The data set's after the group that is handed out now; none once it has ended, where little is left."""
        return self._states.popleft() if self._states and not self._is_over else None
