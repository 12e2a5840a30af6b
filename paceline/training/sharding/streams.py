"""Iterable data: every rank reads the same stream and takes its part, or a data set splits itself by rank.

A stream that all ranks read is dealt out as map-style data is: groups of a batch a rank, an uneven tail divided evenly,
so that every rank knows by itself where it ends. Loader workers read it too, and take the groups in turn. All copies of
the data set shuffle alike, since each group is drawn from a random state of (seed, epoch, group).

Where the data set splits itself, lock-step ranks look some batches ahead and tell each other how many samples these
have: the stream that ends first ends the epoch for all, and every batch has its weight.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.seeding import derive
from paceline.training.sharding.part import Part, Place
from paceline.training.sharding.reader import Reader, enter_worker
from paceline.training.sharding.rebuilding import rebuilt

SPLITS_BY_RANK = "splits_by_rank"
"""The attribute of a data set that yields other samples on each rank."""
_LOOK_AHEAD = 16
"""Batches for which ranks agree at once: a message a step would take a tenth of a short step."""

Gather = Callable[[Any], list[Any]]


@final
class Stream:
    """A rank's part of a `DataLoader` over an `IterableDataset`.

    Args:
        gather: every rank's value, in rank order; a collective call.
        takes_equal_steps: whether all ranks are to have as many batches.
    """

    def __init__(
        self, loader: DataLoader[Any], *, rank: int, size: int, seed: int, gather: Gather, takes_equal_steps: bool
    ) -> None:
        self.is_even = True
        self._loader, self._rank, self._size = loader, rank, size
        self._gather, self._takes_equal_steps = gather, takes_equal_steps
        self._is_split = bool(getattr(loader.dataset, SPLITS_BY_RANK, False))
        self._seed = derive(seed, "stream", rank if self._is_split else "all")
        share = {"rank": 0, "size": 1} if self._is_split else {"rank": rank, "size": size}
        self._reader = Reader(loader, **share, is_split=self._is_split, seed=self._seed)
        self._generator = torch.Generator()
        changes = {"batch_size": None, "collate_fn": _unchanged, "worker_init_fn": enter_worker}
        self._inner: DataLoader[Part] = rebuilt(loader, self._reader, self._generator, **changes)

    def __len__(self) -> int:
        if self._is_split:
            return len(self._loader)
        dataset: Any = self._loader.dataset
        num_samples, batch_size = len(dataset), self._loader.batch_size or 1
        num_full, rest = divmod(num_samples, batch_size * self._size)
        drops_rest = self._loader.drop_last or self._loader.batch_size is None
        return num_full + (not drops_rest and (rest >= self._size or (rest > 0 and num_full == 0)))

    def identity(self) -> dict[str, Any]:
        known = {"batch size": self._loader.batch_size, "drop_last": self._loader.drop_last}
        if self._is_split:
            return {**known, SPLITS_BY_RANK: True, "num_workers": self._loader.num_workers}
        dataset: Any = self._loader.dataset
        return {**known, SPLITS_BY_RANK: False, "samples": len(dataset) if hasattr(dataset, "__len__") else None}

    def parts(self, place: Place) -> Iterator[Part]:
        self._generator.manual_seed(derive(self._seed, "loader", self._rank, place.epoch))
        # Which loader worker of a data set that splits itself read which batches, only reading them again can tell.
        num_skipped = place.num_batches_done if self._is_split and self._loader.num_workers else 0
        self._reader.begin(Place(place.epoch, 0) if num_skipped else place)
        parts = itertools.islice(iter(self._inner), num_skipped, None)
        if not self._is_split:
            return self._compared(parts, place)
        return self._agreed(parts) if self._takes_equal_steps else parts

    def _compared(self, parts: Iterator[Part], place: Place) -> Iterator[Part]:
        """
        Raises:
            UsageError: ranks read other streams. Those that are not in step look when the run begins.
        """
        for number, part in enumerate(parts):
            if number == 0 and part.digest and (self._takes_equal_steps or place == Place(0, 0)):
                digests = self._gather(part.digest)
                for rank, digest in enumerate(digests):
                    if digest != digests[0]:
                        raise UsageError(
                            f"epoch {place.epoch}: the IterableDataset yields other samples on rank {rank} than on "
                            f"rank 0; if it splits itself by rank, set {SPLITS_BY_RANK} = True on it, else have it "
                            "draw from the global random generators or from a seed that is the same on every rank"
                        )
            yield part

    def _agreed(self, parts: Iterator[Part]) -> Iterator[Part]:
        is_over = False
        while not is_over:
            ahead = deque(itertools.islice(parts, _LOOK_AHEAD))
            counts = self._gather([part.num_samples for part in ahead])
            num_common = min(map(len, counts))
            is_over = num_common < _LOOK_AHEAD
            for number in range(num_common):
                part = ahead.popleft()
                total = sum(of_rank[number] for of_rank in counts)
                yield part._replace(weight=part.num_samples * self._size / total)


def _unchanged(part: Part) -> Part:
    return part
