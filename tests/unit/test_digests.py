"""Digests of tensors."""

from __future__ import annotations

import pytest
import torch

from paceline.strategies.digests import digest

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 17, 1000, 4099])
def test_every_change_of_one_element_is_seen(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.arange(count) % 2).to(dtype)
    before = digest([tensor])
    assert digest([tensor.clone()]) == before
    for place in {0, count // 2, count - 1} if count else ():
        changed = tensor.clone()
        changed[place] = 1 - changed[place].to(torch.int64) if dtype is torch.bool else changed[place] + 2
        assert digest([changed]) != before


def test_it_depends_on_order_and_not_on_how_a_tensor_lies() -> None:
    one, other = torch.randn(40, 50), torch.randn(7)
    assert digest([one, other]) != digest([other, one])
    assert digest([one.flip(0)]) != digest([one])
    assert digest([one.T.contiguous().T]) == digest([one])
    buffer = torch.zeros(5001, dtype=torch.float32)
    odd = buffer[1:2001].view(40, 50)
    odd.copy_(one)
    assert digest([odd]) == digest([one])
