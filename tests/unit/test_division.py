"""Means of sums."""

from __future__ import annotations

import pytest
import torch

from paceline.division import divide

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7, 64, 256])
@pytest.mark.parametrize("dtype", FLOATS)
def test_it_is_the_quotient_to_the_last_bit(dtype: torch.dtype, divisor: int) -> None:
    info = torch.finfo(dtype)
    ends = torch.tensor([0.0, -0.0, info.max, -info.max, info.tiny, info.tiny / 4, torch.inf, -torch.inf, 1 / 3])
    wide = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total = torch.cat([ends.double(), wide * 10.0 ** torch.arange(-5, 5).repeat(100)]).to(dtype)
    quotient = total / torch.tensor(divisor, dtype=torch.float64)
    divide(total, divisor)
    words = torch.int16 if dtype.itemsize == 2 else torch.int32 if dtype.itemsize == 4 else torch.int64
    assert torch.equal(total.view(words), quotient.view(words))


@pytest.mark.parametrize("divisor", [2, 3])
def test_complex_sums_and_whole_ones(divisor: int) -> None:
    infinite = torch.tensor([complex(torch.inf, 1.0), complex(3.0, -1.0)])
    quotient = infinite / divisor
    divide(infinite, divisor)
    assert [str(each) for each in infinite.tolist()] == [str(each) for each in quotient.tolist()]
    whole = torch.tensor([7, -7])
    divide(whole, divisor)
    assert whole.tolist() == [7 // divisor, -(7 // divisor)]
