"""What looks like a group of tensors, beside a look at each of them."""

from __future__ import annotations

import weakref

import pytest
import torch

from paceline.horovod.likeness import Likeness


def group() -> list[torch.Tensor]:
    return [torch.zeros(3, 4), torch.zeros(0), torch.tensor(1.0), torch.zeros(2, dtype=torch.int64)]


OTHERS = {
    "shape": torch.zeros(4, 3),
    "as many dimensions less": torch.zeros(12),
    "dtype": torch.zeros(3, 4, dtype=torch.float64),
    "strides": torch.zeros(4, 3).t(),
    "layout": torch.zeros(3, 4).to_sparse(),
    "device": torch.zeros(3, 4, device="meta"),
}


def test_tensors_that_look_the_same() -> None:
    likeness = Likeness(group(), "sum")
    assert likeness.is_of(group(), "sum")
    with torch.no_grad():
        assert likeness.is_of([each + 1 for each in group()], "sum")


@pytest.mark.parametrize("what", OTHERS)
def test_each_difference_is_seen(what: str) -> None:
    assert not Likeness(group(), "sum").is_of([OTHERS[what], *group()[1:]], "sum")


def test_other_numbers_of_tensors_and_other_requests() -> None:
    likeness = Likeness(group(), "sum")
    assert not likeness.is_of(group()[:-1], "sum")
    assert not likeness.is_of([*group(), torch.zeros(1)], "sum")
    assert not likeness.is_of(group(), "mean")


def test_a_tensor_that_has_got_another_shape_since() -> None:
    tensors = group()
    likeness = Likeness(tensors, "sum")
    tensors[0].data = torch.zeros(5)
    assert not likeness.is_of(tensors, "sum")


def test_it_keeps_no_tensor() -> None:
    tensors = group()
    likeness = Likeness(tensors, "sum")
    kept = weakref.ref(tensors[0])
    del tensors
    assert kept() is None
    assert likeness.is_of(group(), "sum")
