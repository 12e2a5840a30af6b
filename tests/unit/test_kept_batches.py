"""Batches that a script keeps are found by their memory, and those that it drops cost nothing."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from paceline.training.kept_batches import Handed, KeptBatches
from paceline.training.sharding.contents import tensors_in
from paceline.training.sharding.part import Place


def handed(*tensors: Tensor, weight: float = 1.0) -> Handed:
    return Handed(Place(0, 0), len(tensors[0]), weight, tuple(map(ref, tensors)))


def test_a_part_of_a_kept_batch_is_found() -> None:
    x, y, other = torch.zeros(8, 2), torch.zeros(8), torch.zeros(8, 2)
    kept, batch = KeptBatches(), handed(x, y)
    kept.add(batch)
    kept.add(handed(other))
    assert list(kept.beside([x[3:5]])) == [batch]
    assert list(kept.beside([torch.zeros(8, 2)])) == []


def test_what_the_script_has_dropped_is_not_kept() -> None:
    kept, x = KeptBatches(), torch.zeros(4)
    kept.add(handed(x))
    dropped: list[Any] = [torch.zeros(4) for _ in range(1000)]
    for each in dropped:
        kept.add(handed(each))
    del each
    dropped.clear()
    for _ in range(2000):
        held = torch.zeros(4)
        kept.add(handed(held))
        assert list(kept.beside([held])), "it is asked for, as where a script reads ahead"
    assert sum(len(some) for some in kept._in_storage.values()) < 100
    assert next(batch.alive[0].data_ptr() for batch in kept) == x.data_ptr()


def test_of_the_same_tensors_the_latest_batch_counts() -> None:
    """A data set that holds its batches hands them out in every epoch."""
    kept, x, y = KeptBatches(), torch.zeros(4, 2), torch.zeros(4)
    for weight in range(1000):
        batch = handed(x, y, weight=weight)
        kept.add(batch)
    assert list(kept) == list(kept.beside([x[1:]])) == [batch]
    kept.forget_dropped()
    assert list(kept) == [batch]


class Thing:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_tensors_are_found_in_the_attributes_of_things_and_not_in_things_of_these() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    thing = Thing(one=one, more=[two], other=Thing(three=three), model=torch.nn.Linear(2, 2))
    thing.itself = thing  # type: ignore[attr-defined]
    assert [len(tensor) for tensor in tensors_in({"a": (thing, three)})] == [1, 2, 3]
    assert tensors_in(torch.nn.Linear(2, 2)) == []
