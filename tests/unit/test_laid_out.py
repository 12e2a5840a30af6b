"""Who joins lays out a pass before it takes part, since the others wait from then on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from paceline.membership import Membership
from paceline.training.sharding.dealt import Dealt
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import Place

SAMPLES = TensorDataset(torch.arange(24))


class Remembering(Sampler[int]):
    """Another order each time it is asked, which depends on how often that was."""

    def __init__(self) -> None:
        self.num_passes = 0

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return iter(range(len(SAMPLES)))


class Loader(NamedTuple):
    """As much of one as tells which pass begins."""

    place: Place
    passes_over: bool = False


def dealt_of(sampler: Sampler[int]) -> tuple[Dealt, Counter[int]]:
    """And how often each epoch was laid out."""
    orders = Orders(DataLoader(SAMPLES, batch_size=4, sampler=sampler), rank=0, size=2, seed=3)
    laid_out = Counter[int]()
    groups = orders.groups

    def counted(epoch: int) -> Iterator[object]:
        laid_out[epoch] += 1
        return groups(epoch)

    orders.groups = counted  # type: ignore[method-assign,assignment]
    return Dealt(orders, rank=0, membership=Membership.first(2), global_batch="keep"), laid_out


def batches(dealt: Dealt, epoch: int) -> list[list[int]]:
    found = []
    for part in dealt.parts(Place(epoch, 0)):
        found.append(part.data[0].tolist())
        dealt.commit()
    return found


@pytest.mark.parametrize("epoch", [0, 5])
def test_a_pass_that_is_laid_out_is_laid_out_once_and_the_same(epoch: int) -> None:
    own, laid_out = dealt_of(RandomSampler(SAMPLES))
    own.lay_out_next(Loader(Place(epoch, 0)))
    assert laid_out == {epoch: 1}
    found = batches(own, epoch)
    assert laid_out == {epoch: 1}
    assert found == batches(dealt_of(RandomSampler(SAMPLES))[0], epoch)
    batches(own, epoch + 1)
    assert laid_out == {epoch: 1, epoch + 1: 1}


def test_another_pass_is_laid_out_when_it_begins() -> None:
    own, _ = dealt_of(RandomSampler(SAMPLES))
    own.lay_out_next(Loader(Place(1, 0)))
    assert batches(own, 2) == batches(dealt_of(RandomSampler(SAMPLES))[0], 2)


def test_samplers_that_remember_draw_no_pass_before_it_begins() -> None:
    sampler = Remembering()
    own, laid_out = dealt_of(sampler)
    before = sampler.num_passes
    own.lay_out_next(Loader(Place(0, 0)))
    assert (sampler.num_passes, laid_out) == (before, {})


def test_a_pass_that_others_have_behind_them_is_not_laid_out() -> None:
    own, laid_out = dealt_of(RandomSampler(SAMPLES))
    own.lay_out_next(Loader(Place(1, 0), passes_over=True))
    assert not laid_out
