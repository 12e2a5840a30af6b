"""Codecs with a memory of what they left out."""

from __future__ import annotations

import pytest
import torch

from paceline.codec import Half


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounding_leaves_out_is_added_to_the_next_tensor(dtype: torch.dtype) -> None:
    codec, tensor = Half(dtype), torch.full((3,), 1 / 3)
    memory, total = codec.start(tensor), torch.zeros(3)
    for _ in range(100):
        payload, memory = codec.encode(tensor, memory)
        total += codec.decode(payload, tensor)
    torch.testing.assert_close(total, 100 * tensor, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("trouble", [torch.inf, -torch.inf, torch.nan, 1e30])
def test_a_tensor_that_cannot_be_held_leaves_the_next_ones_alone(trouble: float) -> None:
    """As where a step with a gradient that is not finite is left out."""
    codec, tensor = Half(torch.float16), torch.tensor([1.0, 2.0])
    payload, memory = codec.encode(torch.tensor([trouble, 2.0]), codec.start(tensor))
    assert not codec.decode(payload, tensor)[0].isfinite()
    payload, memory = codec.encode(tensor, memory)
    assert torch.equal(codec.decode(payload, tensor), tensor)
