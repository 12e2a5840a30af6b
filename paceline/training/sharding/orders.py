"""Map-style data: each epoch's order is drawn from (seed, epoch) on every rank alike, and dealt out."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import random
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from paceline.errors import UsageError
from paceline.seeding import derive, preserved_random_state, random_state, seed_everything, set_random_state
from paceline.training.sharding.division import Group, RankBatch, groups_of, share_out, share_out_plain, undivided
from paceline.training.sharding.fetching import Fetching
from paceline.training.sharding.looks import Looks
from paceline.training.sharding.part import Part, Place

_DRAWN_AT_ONCE = 256
"""Batches; what is drawn at once shares one change of the random state, which takes half a millisecond."""

_STATE = (Tensor, np.ndarray, np.random.Generator, np.random.RandomState, random.Random)
"""What a sampler may remember of its draws, besides torch's generators."""


@final
class Orders:
    """A rank's part of a map-style `DataLoader`, whose sampler may be without an end if it has no length.

    Raises:
        UsageError: the samples are divided already, there is no batch, or a sampler does not end where it says.
    """

    def __init__(self, loader: DataLoader[Any], *, rank: int, size: int, seed: int) -> None:
        self._loader, self._rank, self._size, self._seed = loader, rank, size, seed
        self._batch_sampler = _batch_sampler(loader)
        if any(isinstance(sampler, DistributedSampler) for sampler in self._samplers()):
            raise UsageError(
                "the DataLoader already has a DistributedSampler; prepare divides the data itself: remove it"
            )
        self._generator = torch.Generator()
        self.looks = Looks(loader, is_compared=size > 1)
        is_whole = self._batch_sampler is not None
        self._fetching = Fetching(loader, self._generator, is_whole=is_whole, **self.looks.changes)
        self.order = 0, ""
        """The last epoch that the script's own samplers have drawn, and a digest of how it begins."""
        self._limit = _length(loader.sampler if self._batch_sampler is None else self._batch_sampler)
        with self._as_it_was():
            first = list(self.batches(0)) if self._limit is not None else []
        self._length = len(first) if self._limit is not None else None
        self.is_even = all(batch.weight == 1.0 for batch in first)
        if self._length == 0:
            raise UsageError(f"the DataLoader has no batch for {size} worker(s): fewer samples than a global batch?")

    @property
    def size(self) -> int:
        """Ranks that it is dealt out to."""
        return self._size

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a sampler without a length")
        return self._length

    @property
    def has_end(self) -> bool:
        """Whether it is known how many batches an epoch has."""
        return self._length is not None

    @property
    def is_plain(self) -> bool:
        """Whether an epoch's order depends on nothing but its seed, however often it is drawn."""
        return _is_plain(self._batch_sampler)

    def identity(self) -> dict[str, Any]:
        order = hashlib.blake2b(digest_size=8)
        with self._as_it_was():
            for batch in itertools.islice(self._drawn(0), None if self._length is not None else _DRAWN_AT_ONCE):
                order.update(batch.tobytes() if isinstance(batch, array) else repr(list(batch)).encode())
        return {
            "samples": _length(self._loader.dataset),
            "batch size": getattr(self._batch_sampler, "batch_size", None),
            "drop_last": getattr(self._batch_sampler, "drop_last", False),
            "order": order.hexdigest(),
        }

    def pass_over(self, epoch: int) -> None:
        """Nothing of this epoch is trained on: samplers that know what they have drawn come to where they then are."""
        if self._length is not None and not self.is_plain:
            deque(self._drawn(epoch), maxlen=0)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Afterwards the samplers know nothing of what was drawn inside, on trial."""
        own = [(vars(each), dict(vars(each))) for each in _with_own_objects(self._samplers(), self._loader.dataset)]
        known: dict[int, Any] = {id(self._loader.dataset): self._loader.dataset}
        for attributes, before in own:
            attributes.update({name: _copied(value, known) for name, value in before.items()})
        try:
            yield
        finally:
            for attributes, before in own:
                attributes.clear()
                attributes.update(before)

    def batches(self, epoch: int) -> Iterator[RankBatch]:
        """This rank's indices of an epoch."""
        drawn = self._drawn(epoch)
        if self._size == 1:
            return undivided(drawn)
        if self.is_plain and isinstance(drawn, Sequence):
            return share_out_plain(drawn, rank=self._rank, size=self._size, drop_last=self._drops_last)
        return share_out(drawn, rank=self._rank, size=self._size, drop_last=self._drops_last)

    def groups(self, epoch: int, *, size: int | None = None) -> Iterator[Group]:
        """All ranks' indices of an epoch, by global batches. `size`: ranks, if these are not as many as at first."""
        return groups_of(self._drawn(epoch), size=size or self._size, drop_last=self._drops_last)

    def parts(self, place: Place) -> Iterator[Part]:
        batches = itertools.islice(self.batches(place.epoch), place.num_batches_done, None)
        return self.fetched(batches, self._rank, place.epoch)

    def fetched(self, batches: Iterator[RankBatch], *path: int) -> Iterator[Part]:
        """The samples of these batches. `path`: what tells them from others that are fetched."""
        # Augmentation in loader workers: a stream of its own for every rank, whatever generator the script has given.
        self._generator.manual_seed(derive(self._seed, "loader", *path))
        return self._fetching.parts(batches)

    @property
    def _drops_last(self) -> bool:
        # Where nobody knew how many unbatched samples come, those that are not enough for every rank are left out.
        return getattr(self._batch_sampler, "drop_last", self._batch_sampler is None)

    def _drawn(self, epoch: int) -> Iterable[Sequence[Any]]:
        """All ranks' batches of an epoch."""
        seed, sampler = derive(self._seed, "order", epoch), self._batch_sampler
        if _is_plain(sampler):
            return _plainly_drawn(sampler, seed)
        return self._drawn_by_script(seed, epoch)

    def _drawn_by_script(self, seed: int, epoch: int) -> Iterator[Sequence[Any]]:
        """What the script's own samplers draw, from a random state of their own."""
        with preserved_random_state():
            seed_everything(seed)
            for sampler in self._samplers():
                generator = getattr(sampler, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(seed)
            drawing = iter(self._loader.sampler if self._batch_sampler is None else self._batch_sampler)
            state = random_state()
        num_drawn = 0
        while True:
            with preserved_random_state():
                set_random_state(state)
                drawn = list(itertools.islice(drawing, _DRAWN_AT_ONCE))
                state = random_state()
            if not num_drawn:
                self.order = epoch, hashlib.blake2b(repr(drawn).encode(), digest_size=8).hexdigest()
            num_drawn += len(drawn)
            self._require_end(num_drawn, is_over=len(drawn) < _DRAWN_AT_ONCE)
            yield from ([index] for index in drawn) if self._batch_sampler is None else drawn
            if len(drawn) < _DRAWN_AT_ONCE:
                return

    def _require_end(self, num_drawn: int, *, is_over: bool) -> None:
        """Raise UsageError for a sampler that goes on long after its length, or samples that do not come out even."""
        if self._limit is None:
            return
        if num_drawn > 2 * self._limit + _DRAWN_AT_ONCE:
            raise UsageError(
                f"the DataLoader's sampler has a length of {self._limit} and gives more than {2 * self._limit}; "
                "a sampler without an end must not have a length"
            )
        if is_over and self._batch_sampler is None and num_drawn % self._size:
            raise UsageError(
                f"{num_drawn} unbatched samples cannot be dealt out evenly to {self._size} workers; "
                "give the DataLoader a batch_size"
            )

    def _samplers(self) -> list[Any]:
        """What draws the order of an epoch."""
        return [self._loader.sampler, self._batch_sampler, getattr(self._batch_sampler, "sampler", None)]


def _length(thing: Any) -> int | None:
    """The length, or None where it has none: torch's samplers raise only when they are asked."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


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
) -> list[array[int]]:
    """What torch's samplers draw from this seed. Arrays, since they are kept, and take a quarter of a list's memory."""
    samples = range(num_samples)
    with preserved_random_state():
        seed_everything(seed)
        order = array("q", RandomSampler(samples) if is_shuffled else SequentialSampler(samples))
    end = num_samples - num_samples % batch_size if drop_last else num_samples
    return [order[start : min(start + batch_size, end)] for start in range(0, end, batch_size)]


def _with_own_objects(samplers: Iterable[Any], dataset: Any) -> list[Any]:
    """The samplers, and what they remember in others and in objects of classes that are defined beside their own. What
    has items may be data, and is left as it is; so are models."""
    left = list(samplers)
    given = {id(sampler) for sampler in left}
    modules = {type(sampler).__module__ for sampler in left} - {Sampler.__module__, object.__module__}
    found: dict[int, Any] = {}
    seen = {id(dataset)}
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple | deque | set):
            left += value
        elif isinstance(getattr(value, "__dict__", None), dict):
            is_theirs = isinstance(value, Sampler) or type(value).__module__ in modules
            is_state = is_theirs and not isinstance(value, nn.Module) and not hasattr(type(value), "__getitem__")
            if is_state or id(value) in given:
                found[id(value)] = value
                left += vars(value).values()
    return list(found.values())


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """What a sampler remembers, in containers too, as a copy. Objects of other kinds stay: they may be data sets, or
    are restored by themselves.

    Args:
        known: by its identity, what each thing is in the copy.
    """
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, torch.Generator):
        known[id(value)] = value.clone_state()
    elif isinstance(value, _STATE):
        known[id(value)] = copy.deepcopy(value)
    elif isinstance(value, dict | list | deque | set):
        found: Any = copy.copy(value)
        known[id(value)] = found
        if not isinstance(value, set):
            for place, each in value.items() if isinstance(value, dict) else enumerate(value):
                found[place] = _copied(each, known)
    return known.get(id(value), value)
