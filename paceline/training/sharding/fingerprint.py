"""Numbers that tell whether a map-style data set is the same on all ranks, made where the data set is read."""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch.utils.data import get_worker_info

from paceline.seeding import derive, preserved_random_state, seed_everything
from paceline.training.sharding.contents import digest_of

_NUM_PARTS = 20
"""Of a sample; more are left out."""
_UNKNOWN = 0
"""The number of a part that is missing, or not the same twice."""


def places(length: int, epoch: int) -> tuple[int, ...]:
    """The samples that are looked at: the first, the last, and one that is another in every epoch."""
    return 0, length - 1, derive(epoch, "look") % length


def place_of(slot: int, length: int, epoch: int) -> int:
    """The sample that the number at `slot` of a fingerprint is of."""
    return places(length, epoch)[slot // _NUM_PARTS]


def fingerprint(dataset: Any, epoch: int) -> list[int]:
    """A number for each part of a few samples. What is drawn from the global generators is drawn alike on all ranks."""
    once, again = _read(dataset, epoch), _read(dataset, epoch)
    return [one if one == other else _UNKNOWN for one, other in zip(once, again, strict=True)]


def first_unlike(one: list[int], other: list[int]) -> int | None:
    """The slot of the first part that is known to differ."""
    both = enumerate(zip(one, other, strict=False))
    return next((slot for slot, (mine, theirs) in both if mine != theirs and _UNKNOWN not in (mine, theirs)), None)


def _read(dataset: Any, epoch: int) -> list[int]:
    with preserved_random_state():
        seed_everything(0)
        try:
            samples = [_parts(dataset[place]) for place in places(len(dataset), epoch)]
        except Exception:  # keys that are no indices, a sample that is broken: whoever reads it will say so
            samples = []
    return [number for parts in samples for number in (*parts, *[_UNKNOWN] * (_NUM_PARTS - len(parts)))]


def _parts(sample: Any) -> list[int]:
    parts = list(sample.items()) if isinstance(sample, Mapping) else sample
    if not isinstance(parts, list | tuple):
        parts = [parts]
    return [1 + (int(digest_of(part), 16) >> 2) for part in parts[:_NUM_PARTS]]


@final
class FirstLook:
    """Has the first loader worker look at its copy of the data set as it starts: files may be open there that must not
    be opened here.

    Args:
        init: the script's own function for each loader worker.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init
        # The epoch that is to be looked at, the one that was, how many numbers there are, and these.
        self._shared = torch.full((3 + 3 * _NUM_PARTS,), -1, dtype=torch.int64).share_memory_()

    def begin(self, epoch: int) -> None:
        """Loader workers that start now read this epoch."""
        self._shared[0] = epoch

    @property
    def found(self) -> tuple[int, list[int]] | None:
        """The epoch at whose beginning a loader worker has started last, and the fingerprint there."""
        epoch, count = self._shared[1:3].tolist()
        return (epoch, self._shared[3 : 3 + count].tolist()) if count >= 0 else None

    def __call__(self, worker_id: int) -> None:
        if self._init is not None:
            self._init(worker_id)
        if worker_id == 0:
            info: Any = get_worker_info()
            epoch = int(self._shared[0])
            numbers = fingerprint(info.dataset, epoch)
            self._shared[2] = -1  # who reads meanwhile finds nothing
            self._shared[3 : 3 + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
            self._shared[1] = epoch
            self._shared[2] = len(numbers)
