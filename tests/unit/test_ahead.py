"""The next batch is taken while the present one is trained on, and nothing else is different."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from paceline.ahead import can_be_taken_ahead, pure
from paceline.data import Split, collate
from paceline.engines.threads import has_spare_core
from paceline.sharding import RankBatch, ShardedLoader

WAIT_S = 30.0


def split_of(num_images: int) -> Split:
    generator = torch.Generator().manual_seed(num_images)
    images = torch.randint(0, 256, (num_images, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return Split(images, torch.arange(num_images), torch.full((3, 1, 1), 128.0), torch.full((3, 1, 1), 64.0))


def sharded(loader: DataLoader[Any], *, rank: int = 0, size: int = 1, takes_ahead: bool = True) -> ShardedLoader:
    def nothing(_: RankBatch) -> None: ...

    return ShardedLoader(
        loader,
        rank=rank,
        size=size,
        seed=0,
        on_batch=nothing,
        on_position=lambda: None,
        should_stop=lambda: False,
        takes_ahead=takes_ahead,
    )


@pure
class Watched(Dataset[int]):
    """Says which batch is taken in which thread, and when it has been."""

    def __init__(self, num_batches: int) -> None:
        self.taken = [threading.Event() for _ in range(num_batches)]
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self.taken)

    def __getitem__(self, sample: int) -> int:
        raise AssertionError("batches are taken whole")

    def __getitems__(self, samples: list[int]) -> list[int]:
        self.threads.append(threading.current_thread())
        for sample in samples:
            self.taken[sample].set()
        return samples


# --- what is taken ---------------------------------------------------------------------------------------------------


@given(
    num_images=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    size=st.integers(1, 3),
    done=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_batches_and_random_numbers_are_the_same(
    num_images: int, batch_size: int, size: int, done: int, shuffle: bool
) -> None:
    split = split_of(max(size, num_images))

    def found(*, takes_ahead: bool) -> list[Tensor]:
        torch.manual_seed(0)
        seen: list[Tensor] = []
        for rank in range(size):
            loader = DataLoader(split, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)
            each = sharded(loader, rank=rank, size=size, takes_ahead=takes_ahead)
            each.resume_at(1, min(done, len(each)))
            for _ in range(3):
                for x, y in each:
                    seen += [x, y, torch.randn(1)]
        return seen

    for one, other in zip(found(takes_ahead=True), found(takes_ahead=False), strict=True):
        assert torch.equal(one, other)


def test_one_batch_ahead_in_a_thread_of_its_own() -> None:
    watched = Watched(4)
    loader = sharded(DataLoader(watched, batch_size=1, collate_fn=collate))
    for number, _ in enumerate(loader):
        if number + 1 < len(watched):
            assert watched.taken[number + 1].wait(WAIT_S), "the next one is taken while this one is trained on"
        assert not any(taken.is_set() for taken in watched.taken[number + 2 :]), "no more than one"
    assert len(set(watched.threads)) == 1
    assert watched.threads[0] is not threading.current_thread()


def test_a_script_that_leaves_its_loop_early_goes_on_with_the_next_epoch() -> None:
    loader = sharded(DataLoader(split_of(10), batch_size=2, collate_fn=collate))
    for _ in loader:
        break
    assert loader.epoch == 1
    assert [y.tolist() for _, y in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_what_goes_wrong_goes_wrong_at_its_batch() -> None:
    short = split_of(4)
    split = Split(short.images, torch.arange(6), short.mean, short.std)
    seen: list[Tensor] = []
    with pytest.raises((IndexError, RuntimeError), match="index"):
        seen += [y for _, y in sharded(DataLoader(split, batch_size=2, collate_fn=collate))]
    assert seen == []
    batches = iter(sharded(DataLoader(split, batch_size=2, collate_fn=collate)))
    assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises((IndexError, RuntimeError), match="index"):
        next(batches)


# --- whose batches ---------------------------------------------------------------------------------------------------


class Augmented(Split):
    """A split whose batches are drawn."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        x, y = super().__getitems__(indices)
        return x + torch.randn(x.shape), y


def noisy(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0] + torch.randn(batch[0].shape), batch[1]


class OneByOne(Dataset[int]):
    def __getitem__(self, sample: int) -> int:
        return sample


SPLIT = split_of(6)
LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], bool]] = {
    "a split's": (lambda: DataLoader(SPLIT, batch_size=2, collate_fn=collate), True),
    "one with a sampler of batches": (
        lambda: DataLoader(SPLIT, batch_sampler=BatchSampler(SequentialSampler(SPLIT), 2, False), collate_fn=collate),
        True,
    ),
    "a split's that draws": (
        lambda: DataLoader(
            Augmented(SPLIT.images, SPLIT.labels, SPLIT.mean, SPLIT.std), batch_size=2, collate_fn=collate
        ),
        False,
    ),
    "one that collates by drawing": (lambda: DataLoader(SPLIT, batch_size=2, collate_fn=noisy), False),
    "one that collates as torch does": (lambda: DataLoader(SPLIT, batch_size=2), False),
    "one with processes": (lambda: DataLoader(SPLIT, batch_size=2, collate_fn=collate, num_workers=1), False),
    "one without batches": (lambda: DataLoader(SPLIT, batch_size=None, collate_fn=collate), False),
    "one for a GPU": (lambda: DataLoader(SPLIT, batch_size=2, collate_fn=collate, pin_memory=True), False),
    "one by one": (lambda: DataLoader(pure(OneByOne)(), batch_size=2, collate_fn=collate, sampler=range(4)), False),
}


@pytest.mark.parametrize(("make", "can"), LOADERS.values(), ids=LOADERS.keys())
def test_only_where_samples_decide_on_all_of_a_batch(make: Callable[[], DataLoader[Any]], can: bool) -> None:
    assert can_be_taken_ahead(make()) is can


def test_not_unless_it_is_asked_for() -> None:
    watched = Watched(3)
    assert list(sharded(DataLoader(watched, batch_size=1, collate_fn=collate), takes_ahead=False)) == [[0], [1], [2]]
    assert set(watched.threads) == {threading.current_thread()}


# --- threads and processes -------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_torchs_threads_are_as_many_as_before() -> None:
    @pure
    class Counting(Watched):
        def __getitems__(self, samples: list[int]) -> list[int]:
            return [torch.get_num_threads()]

    def later() -> None:
        torch.rand(10).sum()
        found.append(torch.get_num_threads())

    assert list(sharded(DataLoader(Counting(2), batch_size=1, collate_fn=collate))) == [[1], [1]]
    assert torch.get_num_threads() == 2
    found: list[int] = []
    thread = threading.Thread(target=later)
    thread.start()
    thread.join()
    assert found == [2]


def test_a_fork_takes_its_own_batches_ahead() -> None:
    loader = sharded(DataLoader(SPLIT, batch_size=2, collate_fn=collate))
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if pid == 0:
        signs_of_life = os.EX_SOFTWARE
        try:
            again = sharded(DataLoader(SPLIT, batch_size=2, collate_fn=collate))
            signs_of_life = os.EX_OK if [y.tolist() for _, y in again] == [[0, 1], [2, 3], [4, 5]] else os.EX_DATAERR
        finally:
            os._exit(signs_of_life)
    assert os.waitpid(pid, 0)[1] == 0
    assert [y.tolist() for _, y in batches] == [[2, 3], [4, 5]]


@pytest.mark.usefixtures("two_threads")
def test_a_core_is_spare_where_threads_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, num_processes, is_spare in ((2, 1, False), (3, 1, True), (4, 2, False), (5, 2, True)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=num_cores: set(range(count)))
        assert has_spare_core(num_processes) is is_spare
