"""The next batch is taken while the present one is trained on, and nothing else is different."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from paceline.data import Split, collate
from paceline.engines.threads import spare_cores
from paceline.training import ahead
from paceline.training.ahead import can_be_taken_ahead, pure
from paceline.training.sharding import RankBatch, ShardedLoader

WAIT_S = 30.0


def split_of(num_images: int) -> Split:
    generator = torch.Generator().manual_seed(num_images)
    images = torch.randint(0, 256, (num_images, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return Split(images, torch.arange(num_images), torch.full((3, 1, 1), 128.0), torch.full((3, 1, 1), 64.0))


def sharded(
    loader: DataLoader[Any],
    *,
    rank: int = 0,
    size: int = 1,
    takes_ahead: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> ShardedLoader:
    def nothing(_: RankBatch) -> None: ...

    return ShardedLoader(
        loader,
        rank=rank,
        size=size,
        seed=0,
        on_batch=nothing,
        on_position=lambda: None,
        should_stop=should_stop,
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
        ahead._taker().submit(int).result()  # whatever the thread had to do is done
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
    batches = iter(sharded(DataLoader(split, batch_size=2, collate_fn=collate)))
    assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises((IndexError, RuntimeError), match="index"):
        next(batches)


def test_a_batch_that_nobody_asks_for_any_more_is_let_go() -> None:
    short = split_of(4)
    split = Split(short.images, torch.arange(6), short.mean, short.std)
    seen: list[list[int]] = []
    loader = DataLoader(split, batch_size=2, collate_fn=collate)
    for _, y in sharded(loader, should_stop=lambda: len(seen) == 2):
        seen.append(y.tolist())
    assert seen == [[0, 1], [2, 3]]
    assert [y.tolist() for _, y in sharded(DataLoader(short, batch_size=4, collate_fn=collate))] == [[0, 1, 2, 3]]


def test_a_script_goes_on_when_no_thread_takes_batches_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the interpreter, which scripts in other threads may outlive."""

    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(ahead._taker(), "submit", refuse)
    loader = sharded(DataLoader(split_of(6), batch_size=2, collate_fn=collate))
    assert [y.tolist() for _, y in loader] == [[0, 1], [2, 3], [4, 5]]


# --- whose batches ---------------------------------------------------------------------------------------------------


class Augmented(Split):
    """A split whose batches are drawn."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        x, y = super().__getitems__(indices)
        return x + torch.randn(x.shape), y


def noisy(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0] + torch.randn(batch[0].shape), batch[1]


@functools.wraps(collate)
def wrapping(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return noisy(collate(batch))


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
    "one that draws around what does not": (lambda: DataLoader(SPLIT, batch_size=2, collate_fn=wrapping), False),
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


@pytest.mark.usefixtures("two_threads")
def test_torchs_threads_are_as_many_as_before() -> None:
    @pure
    class Counting(Watched):
        def __getitems__(self, samples: list[int]) -> list[int]:
            return [torch.get_num_threads()]

    def later() -> None:
        torch.rand(10).sum()
        found.append(torch.get_num_threads())

    ahead._taker.cache_clear()  # another thread begins, while two are the number for all
    assert list(sharded(DataLoader(Counting(2), batch_size=1, collate_fn=collate))) == [[1], [1]]
    assert torch.get_num_threads() == 2
    found: list[int] = []
    thread = threading.Thread(target=later)
    thread.start()
    thread.join()
    assert found == [2]


def test_a_fork_takes_its_own_batches() -> None:
    """Those of a loop that it is in, and of one that it begins."""

    def numbers(batches: Iterable[tuple[Tensor, Tensor]]) -> list[list[int]]:
        return [y.tolist() for _, y in batches]

    batches = iter(sharded(DataLoader(SPLIT, batch_size=2, collate_fn=collate)))
    next(batches)
    pid = os.fork()
    if pid == 0:
        status = os.EX_SOFTWARE
        try:
            signal.alarm(int(WAIT_S))
            again = sharded(DataLoader(SPLIT, batch_size=2, collate_fn=collate))
            is_right = numbers(batches) == [[2, 3], [4, 5]] and numbers(again) == [[0, 1], [2, 3], [4, 5]]
            status = os.EX_OK if is_right else os.EX_DATAERR
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert numbers(batches) == [[2, 3], [4, 5]]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("num_usable", "num_cores", "num_processes", "num_spare"),
    [(2, 2, 1, 0), (3, 8, 1, 1), (4, 2, 1, 0), (4, None, 1, 2), (4, 4, 2, 0), (5, 8, 2, 1), (2, 2, 2, 0)],
)
def test_cores_are_left_where_threads_are_fewer(
    num_usable: int, num_cores: int | None, num_processes: int, num_spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_usable)))
    monkeypatch.setattr(psutil, "cpu_count", lambda *, logical: num_cores)
    assert spare_cores(num_processes) == num_spare
