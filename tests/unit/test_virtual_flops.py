"""Counted operations of a forward pass, by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from paceline.engines.virtual.computing.flops import ForwardCount


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_pass_counts_the_same_in_every_mode(mode: Callable[[], AbstractContextManager[object]]) -> None:
    """The first pass of a run may be an evaluation's, which scripts make in inference mode.

    Convolution: 2 images, 4 x 6 x 6 outputs of 3 x 3 x 3 multiplications and additions: 2 * 144 * 54 = 15,552.
    Linear: 2 x 5 outputs of 144 multiplications and additions: 10 * 288 = 2,880.
    """
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    with mode():
        count = ForwardCount(model, list(model.parameters()))
        count.end(model(torch.ones(2, 3, 8, 8)))
    assert count.flop == 15_552 + 2_880
    assert count.num_calls == 5, "views are calls, too"
    # Besides, 4 operations for each element of a layer's output: 288 of the convolution, 10 of the linear layer.
    convolution, linear = 15_552 + 4 * 288, 2_880 + 4 * 10
    whole = convolution + linear
    expected = [convolution / whole * 108 / 112, convolution / whole * 4 / 112, linear / whole * 720 / 725]
    assert count.shares()[:3] == pytest.approx(expected)
