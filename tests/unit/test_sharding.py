"""One epoch's batches divided among ranks."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from paceline.errors import BudgetReached, UsageError
from paceline.seeding import preserved_random_state, random_state
from paceline.training.sharding import Place, RankBatch, share_out
from paceline.training.sharding.division import share_out_plain, undivided
from tests.unit.watched_loader import Numbers, Watched, global_batches, ranks

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


@pytest.mark.parametrize("num_samples", [1, 6, 7])
def test_one_rank_alone_is_dealt_all_that_there_is(num_samples: int) -> None:
    batches = [list(range(start, min(start + 3, num_samples))) for start in range(0, num_samples, 3)]
    assert list(undivided(batches)) == list(share_out(batches, rank=0, size=1))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_plain_batches_are_dealt_out_as_all_others(size: int, drop_last: bool) -> None:
    for num_samples in range(size, 40):
        batches = [list(range(start, min(start + 3, num_samples))) for start in range(0, num_samples, 3)]
        for rank in range(size):
            plain = share_out_plain(batches, rank=rank, size=size, drop_last=drop_last)
            assert list(plain) == list(share_out(batches, rank=rank, size=size, drop_last=drop_last))
