"""Iterable data and samplers without an end, divided among ranks and loader workers."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from paceline.errors import UsageError
from paceline.training.sharding import Part, Place, ShardedLoader


class Stream(IterableDataset[int]):
    """Numbers, of which a loader worker yields its share."""

    def __init__(self, num_samples: int | None, *, shuffles: bool = False) -> None:
        self.num_samples, self.shuffles = num_samples, shuffles

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        numbers: Any = itertools.count() if self.num_samples is None else range(self.num_samples)
        if self.shuffles:
            numbers = random.sample(numbers, len(numbers))
        return itertools.islice(numbers, info.id if info else 0, None, info.num_workers if info else 1)


class Own(Stream):
    """One rank's share of them."""

    splits_by_rank = True

    def __init__(self, num_samples: int, rank: int, size: int) -> None:
        super().__init__(num_samples)
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.rank, None, self.size)


class Stateful(Stream):
    """Knows where it is."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.begins, self.at = 0, 0

    def __iter__(self) -> Iterator[int]:
        begins, self.begins = self.begins, 0
        for number in range(begins, self.num_samples or 0):
            self.at = number + 1
            yield number + 1000 * random.randrange(2)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


class Meeting:
    """Ranks as threads, for collective calls."""

    def __init__(self, size: int) -> None:
        self.size, self.values, self.barrier = size, [None] * size, threading.Barrier(size, timeout=60)
        self.num_calls = 0

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def call(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            values = list(self.values)
            self.num_calls += rank == 0
            self.barrier.wait()
            return values

        return call

    def run(self, program: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
        """What `program(rank, gather)` returns on each rank."""
        found: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            try:
                found[rank] = program(rank, self.gather(rank))
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def read(loader: ShardedLoader, num_batches: int | None = None) -> list[list[int]]:
    return [batch.view(-1).tolist() for batch in itertools.islice(iter(loader), num_batches)]


def dealt(make: Callable[[], DataLoader[Any]], size: int, *, place: Place | None = None) -> list[ShardedLoader]:
    """All ranks' loaders of a stream that every rank reads."""
    loaders = [ShardedLoader(make(), rank=rank, size=size, seed=3) for rank in range(size)]
    for loader in loaders if place else []:
        loader.resume_at(place or Place(0, 0), loader.identity)
    return loaders


def merged(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    return [list(itertools.chain(*group)) for group in zip(*of_ranks, strict=True)]


@given(
    num_samples=st.integers(4, 90),
    batch_size=st.integers(1, 7),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
    first=st.integers(0, 5),
)
@settings(deadline=None, max_examples=50)
def test_a_stream_is_dealt_out_as_one_process_reads_it(
    num_samples: int, batch_size: int, size: int, drop_last: bool, first: int
) -> None:
    def make(batch_size: int = batch_size) -> DataLoader[Any]:
        return DataLoader(Stream(num_samples, shuffles=True), batch_size=batch_size, drop_last=drop_last)

    whole = merged([read(loader) for loader in dealt(make, size)])
    samples = [sample for batch in whole for sample in batch]
    num_dropped = num_samples % (batch_size * size) if drop_last else 0
    assert len(samples) == len(set(samples)) == num_samples - num_dropped
    alone = read(ShardedLoader(make(batch_size * size), rank=0, size=1, seed=3))
    is_joined = not drop_last and 0 < num_samples % (batch_size * size) < size
    assert whole == ([*alone[:-2], alone[-2] + alone[-1]] if is_joined else alone)
    rest = merged([read(loader) for loader in dealt(make, size, place=Place(0, first))])
    assert rest == whole[first:]


@given(
    num_samples=st.integers(3, 60),
    batch_size=st.integers(1, 5),
    size=st.integers(1, 3),
    num_workers=st.integers(1, 2),
    first=st.integers(0, 3),
)
@settings(deadline=None, max_examples=8)
def test_loader_workers_take_a_streams_batches_in_turn(
    num_samples: int, batch_size: int, size: int, num_workers: int, first: int
) -> None:
    def batches(num_workers: int) -> list[list[int]]:
        def make() -> DataLoader[Any]:
            data = Stream(num_samples, shuffles=True)
            return DataLoader(data, batch_size=batch_size, num_workers=num_workers)

        return merged([read(loader) for loader in dealt(make, size, place=Place(0, first))])

    assert batches(num_workers) == batches(0)


def test_epochs_differ_and_repeat() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Stream(24, shuffles=True), batch_size=3, num_workers=1, persistent_workers=True)

    def epochs() -> list[list[list[int]]]:
        loader = ShardedLoader(make(), rank=0, size=2, seed=0)
        return [read(loader), read(loader)]

    first, second = epochs()
    assert first != second
    assert epochs() == [first, second]


class Endless(Sampler[int]):
    """Draws for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(1000)


class Measured(Endless):
    def __len__(self) -> int:
        return 10


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda workers: DataLoader(Numbers(), batch_size=4, sampler=Endless(), num_workers=workers),
        lambda workers: DataLoader(Stream(None), batch_size=4, num_workers=workers),
        lambda workers: DataLoader(Numbers(), batch_size=None, sampler=Endless(), num_workers=workers),
    ],
    ids=["sampler", "stream", "unbatched"],
)
def test_data_without_an_end(make: Callable[[int], DataLoader[Any]], num_workers: int) -> None:
    of_ranks = [read(loader, 300) for loader in dealt(lambda: make(num_workers), 2)]
    assert of_ranks[0] != of_ranks[1]
    resumed = dealt(lambda: make(num_workers), 2, place=Place(0, 280))
    assert [read(loader, 20) for loader in resumed] == [batches[280:] for batches in of_ranks]
    with pytest.raises(TypeError):
        len(resumed[0])


def test_an_endless_sampler_that_has_a_length_is_refused() -> None:
    with pytest.raises(UsageError, match="has a length of 3 and gives more than 6"):
        ShardedLoader(DataLoader(Numbers(), batch_size=4, sampler=Measured()), rank=0, size=2, seed=0)


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "length"), [(24, False, 3), (25, False, 3), (26, False, 4), (25, True, 3)]
)
def test_the_length_of_a_stream_that_has_one(num_samples: int, drop_last: bool, length: int) -> None:
    class Known(Stream):
        def __len__(self) -> int:
            return num_samples

    for loader in dealt(lambda: DataLoader(Known(num_samples), batch_size=4, drop_last=drop_last), 2):
        assert len(loader) == len(read(loader)) == length


def own(num_samples: int, rank: int, size: int, gather: Any, **settings: Any) -> tuple[ShardedLoader, list[Part]]:
    parts: list[Part] = []
    loader = DataLoader(Own(num_samples, rank, size), batch_size=3, **settings)
    sharded = ShardedLoader(
        loader,
        rank=rank,
        size=size,
        seed=0,
        gather=gather,
        takes_equal_steps=True,
        on_part=lambda part, place: parts.append(part),
    )
    return sharded, parts


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_samples", [120, 121, 260, 6])
def test_streams_that_split_themselves_end_together(num_samples: int, num_workers: int) -> None:
    meeting = Meeting(2)

    def program(rank: int, gather: Any) -> Any:
        loader, parts = own(num_samples, rank, 2, gather, num_workers=num_workers)
        return read(loader), [(part.num_samples, part.weight) for part in parts]

    found = meeting.run(program)
    assert len(found[0][0]) == len(found[1][0])
    samples = [sample for batches, _ in found for batch in batches for sample in batch]
    assert len(samples) == len(set(samples))
    num_lost = num_samples - len(samples)
    assert num_lost <= 3 * 2 * max(1, num_workers)
    assert meeting.num_calls <= 2 + len(found[0][0]) / 16  # one of them compares the ranks' loaders
    for group in zip(*(parts for _, parts in found), strict=True):
        total = sum(num for num, _ in group)
        assert [weight for _, weight in group] == pytest.approx([num * 2 / total for num, _ in group])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_splits_itself_goes_on_where_it_was(num_workers: int) -> None:
    def program(first: int) -> Callable[[int, Any], Any]:
        def work(rank: int, gather: Any) -> Any:
            loader, _ = own(130, rank, 2, gather, num_workers=num_workers)
            loader.resume_at(Place(1, first), loader.identity)
            return [read(loader), read(loader), read(loader)]

        return work

    whole, rest = Meeting(2).run(program(0)), Meeting(2).run(program(7))
    for of_whole, of_rest in zip(whole, rest, strict=True):
        assert of_rest == [[], of_whole[1][7:], of_whole[2]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_that_knows_where_it_is_goes_on_by_itself(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Stateful(60), batch_size=4, num_workers=num_workers)

    whole = ShardedLoader(make(), rank=1, size=2, seed=0)
    batches, places = [], []
    for batch in whole:
        batches.append(batch.tolist())
        places.append(whole.place)
    assert places[2].state == {"at": 24}
    for done in (3, 7):
        data = make()
        resumed = ShardedLoader(data, rank=1, size=2, seed=0)
        resumed.resume_at(places[done - 1], whole.identity)
        assert read(resumed) == batches[done:]
        assert data.dataset.at == 60 or num_workers  # type: ignore[attr-defined]


def test_ranks_that_read_other_streams_are_told() -> None:
    def program(rank: int, gather: Any) -> Any:
        data = DataLoader(Own(40, rank, 2), batch_size=3)
        data.dataset.splits_by_rank = False  # type: ignore[attr-defined]
        return read(ShardedLoader(data, rank=rank, size=2, seed=0, gather=gather))

    for error in Meeting(2).run(program):
        assert isinstance(error, UsageError)
        assert "yields other samples on rank 1 than on rank 0" in str(error)


class Noisy(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1) + random.random()


def test_loader_workers_of_every_rank_draw_their_own_random_numbers() -> None:
    def drawn(rank: int, seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(Noisy(), batch_size=250, num_workers=2, generator=generator)
        sharded = ShardedLoader(loader, rank=rank, size=2, seed=seed)
        return [number for _ in range(2) for batch in sharded for number in batch.view(-1).tolist()]

    everything = [number for rank in range(2) for number in drawn(rank, seed=0)]
    assert len(set(everything)) > 0.99 * len(everything)
    assert drawn(1, seed=0) == everything[1000:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: DataLoader(Numbers(), batch_size=4 + rank), "has batch size 4, rank 1's has batch size 5"),
        (lambda rank: DataLoader(range(40 - rank), batch_size=4), "has samples 40, rank 1's has samples 39"),  # type: ignore[arg-type]
        (lambda rank: DataLoader(range(40), batch_size=4, sampler=range(rank, 40 + rank)), "rank 1's draws the order"),  # type: ignore[arg-type]
        (lambda rank: DataLoader(Stream(9), batch_size=4 + rank), "has batch size 4, rank 1's has batch size 5"),
    ],
    ids=["batch size", "length", "order", "stream"],
)
def test_ranks_with_other_loaders_are_told(make: Callable[[int], DataLoader[Any]], message: str) -> None:
    found = Meeting(2).run(lambda rank, gather: ShardedLoader(make(rank), rank=rank, size=2, seed=0, gather=gather))
    assert [type(error) for error in found] == [UsageError] * 2
    assert message in str(found[0])
