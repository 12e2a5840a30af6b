"""Refuses to train on a loader that was not prepared beside one that was: every worker would train on all its samples.

torch tells nobody that a loader is read. So all loaders of this process are listened to while somebody watches.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any, final
from weakref import ref

from torch.utils.data import DataLoader, DistributedSampler

from paceline.errors import UsageError
from paceline.hooks import Listening
from paceline.training.sharding.part import DIFFERS

_NUM_STEPS = 3
"""Batches in so many steps in a row are trained on. An evaluation takes all of its batches between two steps."""


@final
@dataclass
class _Pass:
    """One pass over a loader."""

    batches: ref[Any]
    num_taken: int = 0
    num_steps: int = 0
    """Steps in a row before each of which the script took batches."""


@final
class UnpreparedLoaders:
    """
    Args:
        size: number of workers. A loader whose sampler shares its samples out among so many is left alone.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.passes: list[_Pass] = []
        """Over loaders that were not prepared."""
        self._num_prepared = 0
        if size > 1:
            _listening.add(self)

    def begin_pass(self, loader: DataLoader[Any], batches: Any) -> None:
        """The script begins to read a loader."""
        if not hasattr(batches, "_num_yielded"):
            return  # an iterator of somebody else's, put in the place of torch's
        is_shared_out = isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas == self._size
        if not is_shared_out and not getattr(loader.dataset, DIFFERS, False):
            # Loader workers that persist give the same object for every pass.
            self.passes = [one for one in self.passes if one.batches() not in (None, batches)]
            self.passes.append(_Pass(ref(batches)))

    def look(self, num_prepared: int) -> None:
        """Before each step.

        Args:
            num_prepared: batches that prepared loaders have given. Steps before which no loader gave one do not count.

        Raises:
            UsageError: the script trains on a loader that was not prepared.
        """
        is_new, self._num_prepared = num_prepared != self._num_prepared, num_prepared
        for one in self.passes:
            batches: Any = one.batches()
            num_taken = 0 if batches is None else batches._num_yielded
            if num_taken > one.num_taken:
                one.num_steps += 1
            elif is_new:
                one.num_steps = 0
            one.num_taken = num_taken
            if one.num_steps == _NUM_STEPS:
                raise UsageError(
                    f"rank {self._rank}: the script takes a batch for every step from a loader of "
                    f"{type(batches._dataset).__name__} that was not prepared, so every worker would train on all of "
                    "its samples; give prepare every loader, by name: prepare(model=..., optimizer=..., data=..., "
                    f"more_data=...). If each worker is to have all of them, set loader.dataset.{DIFFERS} = True"
                )

    def close(self) -> None:
        self.passes.clear()
        _listening.remove(self)


def _begin_pass(watch: UnpreparedLoaders, own: Callable[[DataLoader[Any]], Any], loader: DataLoader[Any]) -> Any:
    batches = own(loader)
    if not _reads_prepared():
        watch.begin_pass(loader, batches)
    return batches


def _reads_prepared() -> bool:
    """Whether a prepared loader reads: torch's own beneath it, or one that its data set reads."""
    return any(frame.f_code.co_filename == _PREPARED for frame, _ in walk_stack(sys._getframe(1)))


_PREPARED = os.path.join(os.path.dirname(__file__), "loader.py")
_listening = Listening(DataLoader, "__iter__", _begin_pass)
