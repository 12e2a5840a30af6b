"""Loaders with samplers of any kind, divided among ranks: what they draw, what they remember, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.errors import UsageError
from tests.unit.watched_loader import Numbers, Watched, global_batches, ranks

# --- samplers -------------------------------------------------------------------------------------------------------


class Shuffled(Sampler[int]):
    """A sampler of the script's own, which draws from a global generator."""

    def __init__(self, size: int, source: str) -> None:
        self.size, self.source = size, source

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        {"python": random.shuffle, "numpy": np.random.shuffle}[self.source](order)
        return iter(order)


def pairs_of_a_generator(n: int) -> DataLoader[Any]:
    generator = torch.Generator()
    generator.seed()
    return DataLoader(Numbers(n), batch_sampler=BatchSampler(RandomSampler(range(n), generator=generator), 3, False))


def with_generator(n: int) -> DataLoader[Any]:
    generator = torch.Generator()
    generator.seed()
    return DataLoader(Numbers(n), batch_size=3, shuffle=True, generator=generator)


LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "generator": with_generator,
    "generator of a batch sampler": pairs_of_a_generator,
    "subset": lambda n: DataLoader(Numbers(2 * n), batch_size=3, sampler=SubsetRandomSampler(range(0, 2 * n, 2))),
    "python": lambda n: DataLoader(Numbers(n), batch_size=3, sampler=Shuffled(n, "python")),
    "numpy": lambda n: DataLoader(Numbers(n), batch_size=3, sampler=Shuffled(n, "numpy")),
    "batch sampler": lambda n: DataLoader(
        Numbers(n), batch_sampler=BatchSampler(SequentialSampler(range(n)), 4, False)
    ),
    "unbatched": lambda n: DataLoader(Numbers(n), batch_size=None, shuffle=True),
    "fetched as batches": lambda n: DataLoader(
        Numbers(n), batch_size=None, sampler=BatchSampler(RandomSampler(range(n)), 4, False)
    ),
    "two processes": lambda n: DataLoader(Numbers(n), batch_size=3, shuffle=True, num_workers=2),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_sampler_is_divided_and_repeats_by_seed_and_epoch(name: str) -> None:
    n, size = 24, 2

    def epochs(num_epochs: int) -> list[list[list[int]]]:
        watched = ranks(lambda: LOADERS[name](n), size)
        return [global_batches([one.epoch() for one in watched]) for _ in range(num_epochs)]

    first, second = epochs(2)
    expected = list(range(0, 2 * n, 2)) if name == "subset" else list(range(n))
    for epoch in (first, second):
        assert sorted(sample for batch in epoch for sample in batch) == expected
    assert (first == second) == (name == "batch sampler")
    assert epochs(1) == [first]
    assert len(LOADERS[name](n)) == size * len(first)


def test_samples_drawn_with_weights_are_the_same_on_every_rank() -> None:
    weights = [0.0] * 5 + [1.0] * 5

    def make(batch_size: int = 4) -> DataLoader[Any]:
        return DataLoader(Numbers(10), batch_size=batch_size, sampler=WeightedRandomSampler(weights, 40))

    merged = global_batches([watched.epoch() for watched in ranks(make, 2)])
    assert [len(batch) for batch in merged] == [8] * 5
    assert {sample for batch in merged for sample in batch} <= set(range(5, 10))
    assert merged == Watched(make(8)).epoch()


def test_a_batch_samplers_drop_last_is_honoured() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(22), batch_sampler=BatchSampler(SequentialSampler(range(22)), 4, True))

    # One process with batches of 8 would drop the last 6.
    assert [len(watched.epoch()) for watched in ranks(make, 2)] == [2, 2]


def test_unbatched_samples_must_come_out_even() -> None:
    with pytest.raises(UsageError, match="9 unbatched samples cannot be dealt out evenly to 2 workers"):
        Watched(DataLoader(Numbers(9), batch_size=None), size=2)


def test_batches_fetched_at_once_count_all_their_samples() -> None:
    watched = Watched(LOADERS["fetched as batches"](10))
    assert [len(batch) for batch in watched.epoch()] == [4, 4, 2]
    assert [num_samples for num_samples, _ in watched.placed] == [4, 4, 2]


# --- what is refused ------------------------------------------------------------------------------------------------


class Special(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sharded": (
        lambda: DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), num_replicas=2, rank=0)),
        "already has a DistributedSampler",
    ),
    "sharded in batches": (
        lambda: DataLoader(
            Numbers(4), batch_sampler=BatchSampler(DistributedSampler(Numbers(4), num_replicas=2, rank=0), 2, False)
        ),
        "already has a DistributedSampler",
    ),
    "iterates its own way": (lambda: Special(Numbers(4)), "Special iterates in a way of its own"),
    "no loader": (lambda: [1, 2], "takes a torch DataLoader, not list"),
    "no batch": (lambda: DataLoader(Numbers(4), batch_size=5, drop_last=True), "no batch for 2 worker"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        Watched(make(), size=2)


class Remembering(Sampler[int]):
    """Draws by what it remembers, in each kind of thing that a sampler may remember something in. Data sets that it
    holds are not copied."""

    drawn_from: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.tensor, self.array, self.nested = torch.zeros(1), np.zeros(1), {"passes": [0]}
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.source, self.parts = torch.Generator().manual_seed(0), [Numbers(2)]

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        self.tensor += 1
        self.array += 1
        self.nested["passes"][0] += 1
        self.numpy.random()
        self.python.random()
        torch.rand(1, generator=self.source)
        self.drawn_from.update(map(id, self.parts))
        return iter(range(8))

    def known(self) -> list[Any]:
        return [
            float(self.tensor),
            float(self.array[0]),
            self.nested,
            self.numpy.bit_generator.state,
            self.python.getstate(),
        ]


def test_what_samplers_remember_is_as_it_was_when_a_loader_was_prepared() -> None:
    sampler, fresh = Remembering(), Remembering()
    watched = Watched(DataLoader(Numbers(8), batch_size=2, sampler=sampler))
    assert sampler.known() == fresh.known()
    assert len(list(watched.loader)) == 4
    assert Remembering.drawn_from == {id(sampler.parts[0])}
    iter(fresh)
    assert sampler.known() == fresh.known()
