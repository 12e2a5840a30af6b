"""The next batch is taken in a thread of its own while the present one is trained on."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, final

import torch
from torch.utils.data import DataLoader

_MARK = "_paceline_pure"

Thing = TypeVar("Thing", bound=Callable[..., Any])


def pure(thing: Thing) -> Thing:
    """Say of a data set's class, or of a function that collates, that what it gives depends on nothing but what it is
    asked for, does not change while an epoch is under way, and that any thread may ask.

    It is not said of subclasses, nor of functions that wrap this one.
    """
    setattr(thing, _MARK, thing)
    return thing


def can_be_taken_ahead(loader: DataLoader[Any]) -> bool:
    """Whether nothing but the samples decides on what is in a batch, and the script's own thread would take it."""
    is_pure = all(getattr(thing, _MARK, None) is thing for thing in (type(loader.dataset), loader.collate_fn))
    takes_batches = loader.batch_sampler is not None and hasattr(loader.dataset, "__getitems__")
    return is_pure and takes_batches and loader.num_workers == 0 and not loader.pin_memory


def batches_ahead(loader: DataLoader[Any], batches: Sequence[Sequence[int]]) -> Iterator[Any]:
    """The batches of these samples, in order, of a loader whose batches can be taken ahead.

    Where a core was free it saved 6 to 8 % of a virtual run of the conv net. Where torch's threads computed on all of
    them it cost as much, since they wait for the one that has to share its core (docs/design/decisions.md).
    """
    if not batches:
        return
    coming = _Coming(loader, batches[0])
    for samples in batches[1:]:
        batch = coming.batch()
        coming = _Coming(loader, samples)
        yield batch
    yield coming.batch()


@final
class _Coming:
    """A batch that is being taken."""

    def __init__(self, loader: DataLoader[Any], samples: Sequence[int]) -> None:
        self._loader, self._samples, self._pid = loader, samples, os.getpid()
        self._future: Future[Any] | None = None
        # No work is taken any more where the interpreter is ending, but for a script in another thread.
        with contextlib.suppress(RuntimeError):
            self._future = _taker().submit(self._take)

    def batch(self) -> Any:
        """Waits for it, and takes it here where nobody else does."""
        if self._future is None or os.getpid() != self._pid:  # a fork has no other threads
            return self._take()
        return self._future.result()

    def _take(self) -> Any:
        dataset: Any = self._loader.dataset
        return self._loader.collate_fn(dataset.__getitems__(list(self._samples)))


@functools.cache
def _taker() -> ThreadPoolExecutor:
    """One thread for all loaders of this process, which computes alone."""
    num_threads = torch.get_num_threads()
    taker = ThreadPoolExecutor(1, "paceline-batches", initializer=_compute_alone)
    taker.submit(int).result()  # it has begun
    torch.set_num_threads(num_threads)  # for threads that begin after it, which would otherwise do as it does
    return taker


def _compute_alone() -> None:
    torch.get_num_threads()  # a thread takes the number that holds for all when it first asks, and so after this
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_taker.cache_clear)
