"""One epoch's batches divided among ranks."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.errors import BudgetReached, UsageError
from paceline.seeding import preserved_random_state, random_state
from paceline.training.sharding import Part, Place, RankBatch, ShardedLoader, share_out


class Numbers(Dataset[Tensor]):
    """Sample i is the number i; a list of indices gives their batch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int | list[int]) -> Tensor:
        return torch.tensor(index)


class Watched:
    """A rank's loader, and what it told the session."""

    def __init__(self, loader: DataLoader[Any], *, rank: int = 0, size: int = 1, seed: int = 0) -> None:
        self.placed: list[tuple[int, float]] = []
        """Samples and weight of each batch."""
        self.positions = 0
        self.stop = False
        self.loader = ShardedLoader(
            loader,
            rank=rank,
            size=size,
            seed=seed,
            on_part=self._on_part,
            on_position=self._on_position,
            should_stop=lambda: self.stop,
        )

    def _on_part(self, part: Part, place: Place) -> None:
        self.placed.append((part.num_samples, part.weight))
        assert place == self.loader.place

    def _on_position(self) -> None:
        self.positions += 1

    def epoch(self) -> list[list[int]]:
        return [batch.view(-1).tolist() for batch in self.loader]


def ranks(make: Callable[[], DataLoader[Any]], size: int, *, seed: int = 0) -> list[Watched]:
    return [Watched(make(), rank=rank, size=size, seed=seed) for rank in range(size)]


def global_batches(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    """The k-th batches of all ranks together, in rank order."""
    return [[sample for batch in group for sample in batch] for group in zip(*of_ranks, strict=True)]


CASES = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 120),
        "batch_size": st.integers(1, 17),
        "size": st.integers(1, 7),
        "drop_last": st.booleans(),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 5),
        "epoch": st.integers(0, 3),
    }
)


# --- the division ---------------------------------------------------------------------------------------------------


@given(case=CASES)
def test_every_sample_once_and_as_many_batches_for_every_rank(case: dict[str, Any]) -> None:
    n, b, size, drop_last = case["num_samples"], case["batch_size"], case["size"], case["drop_last"]

    def make(batch_size: int = b) -> DataLoader[Any]:
        return DataLoader(Numbers(n), batch_size=batch_size, shuffle=case["shuffle"], drop_last=drop_last)

    if n < (size * b if drop_last else size):
        with pytest.raises(UsageError, match=r"worker"):
            ranks(make, size)
        return
    of_ranks = [watched.loader.batches(case["epoch"]) for watched in ranks(make, size, seed=case["seed"])]
    assert len({len(batches) for batches in of_ranks}) == 1
    assert all(batch.samples for batches in of_ranks for batch in batches)
    for group in zip(*of_ranks, strict=True):
        assert sum(batch.weight for batch in group) == pytest.approx(size)
        total = sum(len(batch.samples) for batch in group)
        assert [batch.weight for batch in group] == pytest.approx([len(b.samples) * size / total for b in group])
    merged = global_batches([[list(batch.samples) for batch in batches] for batches in of_ranks])
    seen = [sample for batch in merged for sample in batch]
    num_full = n // (size * b)
    assert len(seen) == len(set(seen)) == (num_full * size * b if drop_last else n)
    # One process with the combined batch sees the same samples in the same global batches.
    alone = Watched(make(size * b), seed=case["seed"]).loader.batches(case["epoch"])
    expected = [list(batch.samples) for batch in alone]
    # Except where the last samples are fewer than the ranks: they join the global batch before them.
    is_joined = 0 < n % (size * b) < size and not drop_last
    if is_joined:
        assert merged == [*expected[:-2], expected[-2] + expected[-1]]
    else:
        assert merged == expected
    if not case["shuffle"]:
        assert seen == list(range(len(seen)))


@given(case=CASES)
def test_the_order_is_that_of_seed_and_epoch_alone(case: dict[str, Any]) -> None:
    n = case["num_samples"] + 40

    def orders(seed: int, epoch: int) -> list[tuple[int, ...]]:
        loader = DataLoader(Numbers(n), batch_size=case["batch_size"], shuffle=True)
        torch.manual_seed(random.randrange(2**32))
        return [batch.samples for batch in Watched(loader, seed=seed).loader.batches(epoch)]

    first = orders(case["seed"], case["epoch"])
    assert orders(case["seed"], case["epoch"]) == first
    assert orders(case["seed"], case["epoch"] + 1) != first
    assert orders(case["seed"] + 1, case["epoch"]) != first


class OwnBatches(BatchSampler):
    """Torch's, but not known to be."""


@given(case=CASES)
def test_torchs_own_samplers_are_read_as_any_others_are(case: dict[str, Any]) -> None:
    n, drop_last = case["num_samples"], case["drop_last"]
    assume(n >= (case["size"] * case["batch_size"] if drop_last else case["size"]))

    def batches_of(batch_sampler: type[BatchSampler]) -> list[RankBatch]:
        samples = range(n)
        sampler: Sampler[int] = RandomSampler(samples) if case["shuffle"] else SequentialSampler(samples)
        loader = DataLoader(Numbers(n), batch_sampler=batch_sampler(sampler, case["batch_size"], drop_last))
        watched = Watched(loader, rank=0, size=case["size"], seed=case["seed"])
        return watched.loader.batches(case["epoch"])

    assert batches_of(BatchSampler) == batches_of(OwnBatches)


def test_divide_deals_batches_out_in_turn() -> None:
    batches = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert [b.samples for b in list(share_out(batches, rank=0, size=2))] == [(0, 1), (4, 5), (8,)]
    assert [b.samples for b in list(share_out(batches, rank=1, size=2))] == [(2, 3), (6, 7), (9, 10)]
    assert [b.weight for b in list(share_out(batches, rank=1, size=2))] == [1.0, 1.0, pytest.approx(4 / 3)]
    assert [b.samples for b in list(share_out(batches, rank=1, size=2, drop_last=True))] == [(2, 3), (6, 7)]


def test_divide_joins_a_last_group_that_is_too_small_to_the_one_before() -> None:
    batches = [[0, 1], [2, 3], [4, 5], [6]]
    assert [next(share_out(batches, rank=r, size=3)).samples for r in range(3)] == [(0, 1), (2, 3), (4, 5, 6)]
    assert len(list(share_out(batches, rank=0, size=3))) == 1


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(UsageError, match="2 samples cannot be divided among 3 workers"):
        list(share_out([[0, 1]], rank=0, size=3))
    assert list(share_out([], rank=0, size=3)) == []


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20), size=st.integers(1, 5))
def test_batches_of_any_lengths_are_divided_without_loss(lengths: list[int], size: int) -> None:
    samples = iter(range(sum(lengths)))
    batches = [[next(samples) for _ in range(length)] for length in lengths]
    if sum(lengths) < size:
        with pytest.raises(UsageError):
            list(share_out(batches, rank=0, size=size))
        return
    of_ranks = [list(share_out(batches, rank=rank, size=size)) for rank in range(size)]
    merged = global_batches([[list(batch.samples) for batch in mine] for mine in of_ranks])
    assert [sample for batch in merged for sample in batch] == list(range(sum(lengths)))
    for group in zip(*of_ranks, strict=True):
        assert all(batch.samples for batch in group)
        assert sum(batch.weight for batch in group) == pytest.approx(size)


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


# --- iterating ------------------------------------------------------------------------------------------------------


def test_each_batch_is_announced_before_it_is_handed_out() -> None:
    watched = Watched(DataLoader(Numbers(10), batch_size=3, shuffle=True), rank=1, size=2)
    assert len(watched.loader) == 2
    for number, data in enumerate(watched.loader, 1):
        assert len(watched.placed) == number
        assert len(data) == watched.placed[-1][0]
        assert watched.loader.place == Place(0, number)
    assert watched.loader.place == Place(1, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 3, 4])
def test_resuming_yields_exactly_the_rest(done: int, num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(23), batch_size=3, shuffle=True, num_workers=num_workers)

    straight = Watched(make(), rank=1, size=2)
    all_epochs = [straight.epoch() for _ in range(4)]
    resumed = Watched(make(), rank=1, size=2)
    resumed.loader.resume_at(Place(2, done), resumed.loader.identity)
    assert resumed.epoch() == []
    assert resumed.epoch() == []
    assert resumed.positions == 0
    assert resumed.epoch() == all_epochs[2][done:]
    assert resumed.positions == 1
    assert resumed.epoch() == all_epochs[3]
    assert resumed.positions == 1
    assert resumed.placed == straight.placed[2 * len(straight.loader) + done :]


def test_stopping_keeps_the_place() -> None:
    watched = Watched(DataLoader(Numbers(12), batch_size=2))
    seen = 0
    for _ in watched.loader:
        seen += 1
        watched.stop = seen == 2
    assert seen == 2
    assert watched.loader.place == Place(0, 2)
    assert watched.epoch() == []
    assert watched.loader.place == Place(0, 2)


def test_leaving_the_loop_with_the_run_keeps_the_place() -> None:
    watched = Watched(DataLoader(Numbers(12), batch_size=2))
    for _ in watched.loader:
        watched.stop = True
        break
    assert watched.loader.place == Place(0, 1)


def test_a_script_that_leaves_its_loop_early_goes_on_with_the_next_epoch() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(40), batch_size=4, shuffle=True)

    straight = Watched(make())
    expected = [straight.epoch()[0] for _ in range(3)]
    early = Watched(make())
    found = []
    for _ in range(3):
        for data in early.loader:
            found.append(data.tolist())
            break
    assert found == expected
    assert early.loader.place == Place(3, 0)


def test_a_script_that_asks_for_epochs_for_ever_is_ended() -> None:
    watched = Watched(DataLoader(Numbers(4), batch_size=2))
    watched.stop = True
    assert [watched.epoch() for _ in range(100)] == [[]] * 100
    with pytest.raises(BudgetReached):
        deque((watched.epoch() for _ in range(10_000)), maxlen=0)


def test_global_random_state_is_untouched() -> None:
    watched = Watched(DataLoader(Numbers(30), batch_size=4, shuffle=True))
    before = random_state()
    with preserved_random_state():
        expected = (torch.rand(1).item(), random.random(), np.random.rand())
    watched.loader.batches(3)
    Watched(DataLoader(Numbers(30), batch_size=4, shuffle=True), rank=1, size=3, seed=9)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert not torch.equal(before["torch"], random_state()["torch"])


def test_what_else_a_dataloader_has_is_reached() -> None:
    loader = DataLoader(Numbers(4), batch_size=2)
    watched = Watched(loader)
    assert watched.loader.dataset is loader.dataset
    assert watched.loader.batch_size == 2
    with pytest.raises(AttributeError):
        _ = watched.loader.no_such_thing
    assert len(copy.copy(watched.loader)) == 2


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
