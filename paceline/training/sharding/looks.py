"""Looks at a few samples of a loader, where its data are read: in this process, or in its first loader worker."""

from typing import Any, final

import torch
from torch.utils.data import DataLoader

from paceline.training.sharding.fingerprint import Fingerprint, FirstLook, fingerprint, first_unlike, places
from paceline.training.sharding.rebuilding import rebuilt


@final
class Looks:
    """What a loader's samples are as its first pass begins, before the script changes what it trains on, and in later
    epochs.

    Args:
        is_compared: whether ranks compare them in every epoch; if not, the first look is the only one.
    """

    def __init__(self, loader: DataLoader[Any], *, is_compared: bool) -> None:
        self._loader, self._is_compared = loader, is_compared
        self._in_worker = FirstLook(loader.worker_init_fn) if loader.num_workers else None
        self.first: Fingerprint | None = None
        """As the first pass began."""
        self.expected: Fingerprint | None = None
        """What a checkpoint says that it was."""

    @property
    def changes(self) -> dict[str, Any]:
        """What to change in the script's loader, so that its workers look."""
        return {} if self._in_worker is None else {"worker_init_fn": self._in_worker}

    def begin(self, epoch: int, *, reads: bool) -> None:
        """A pass begins. `reads`: batches will be read in it."""
        if self.first is not None:
            if self._in_worker is not None:
                self._in_worker.begin(epoch if self._is_compared else None)
        elif self._in_worker is None:
            self.first = fingerprint(self._loader.dataset, 0, expected=self.expected)
        else:
            self._in_worker.begin(0, self.expected)
            if not reads and self.expected is not None:
                _start_worker(self._loader, self._in_worker)
                self.note()

    def note(self) -> None:
        """Loader workers have started, if there are any."""
        if self.first is None and self._in_worker is not None and self._in_worker.found is not None:
            _, self.first = self._in_worker.found

    def at(self, epoch: int) -> tuple[int, Fingerprint] | None:
        """The epoch in which the data set was looked at last, this one where it is read in this process, and what was
        found."""
        if self._in_worker is not None:
            return self._in_worker.found
        if epoch == 0 and self.first is not None:
            return epoch, self.first
        return epoch, fingerprint(self._loader.dataset, epoch)

    def other_sample(self) -> int | None:
        """The place of a sample that is not what the checkpoint says, if there is one."""
        if self.first is None or self.expected is None:
            return None
        number = first_unlike(self.first, self.expected)
        dataset: Any = self._loader.dataset
        return None if number is None else places(len(dataset), 0)[number]


def _start_worker(loader: DataLoader[Any], init: FirstLook) -> None:
    """One of the loader's workers starts, reads a sample, and ends."""
    changes: dict[str, Any] = {"num_workers": 1, "persistent_workers": False, "pin_memory": False}
    changes |= {"batch_size": None, "sampler": [0], "collate_fn": _nothing, "worker_init_fn": init}
    try:
        next(iter(rebuilt(loader, loader.dataset, torch.Generator(), **changes)), None)
    except Exception:  # as where a sample is broken
        return


def _nothing(sample: Any) -> int:
    return 0
