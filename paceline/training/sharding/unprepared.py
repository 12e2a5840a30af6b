"""Refuses to train on a loader that was not prepared beside one that was: every worker would train on all its samples.

torch tells nobody that a loader is read. So all loaders of this process are listened to while somebody watches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, final
from weakref import WeakSet, ref

from torch.utils.data import DataLoader, DistributedSampler

from paceline.errors import UsageError
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
            _here.set(self)

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


@contextmanager
def reading_prepared() -> Iterator[None]:
    """What is read inside is read for a loader that was prepared."""
    before = _here.set(None)
    try:
        yield
    finally:
        _here.reset(before)


@final
class _Listening:
    """To every loader of the process, while somebody watches."""

    def __init__(self) -> None:
        self._watching: WeakSet[UnpreparedLoaders] = WeakSet()
        self._own: Callable[[DataLoader[Any]], Any] | None = None
        self._begin: Callable[[DataLoader[Any]], Any] | None = None

    def add(self, watch: UnpreparedLoaders) -> None:
        self._watching.add(watch)
        if self._own is None:
            self._own = own = DataLoader.__iter__

            @wraps(own)
            def begin(loader: DataLoader[Any]) -> Any:
                batches = own(loader)
                watch = _here.get()
                if watch is not None and watch in self._watching:
                    watch.begin_pass(loader, batches)
                return batches

            self._begin = begin
            DataLoader.__iter__ = begin  # type: ignore[method-assign]

    def remove(self, watch: UnpreparedLoaders) -> None:
        self._watching.discard(watch)
        if not self._watching and self._own is not None and DataLoader.__iter__ is self._begin:
            DataLoader.__iter__, self._own = self._own, None  # type: ignore[method-assign]


_here: ContextVar[UnpreparedLoaders | None] = ContextVar("unprepared_loaders", default=None)
"""The watch of the worker that runs here: virtual ones have a context each."""
_listening = _Listening()
