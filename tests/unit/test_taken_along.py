"""What a script has taken of a parameter that moves."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from paceline.layout import TensorSpec
from paceline.strategies.taken_along import TakenAlong


def test_tensors_follow_and_arrays_keep_memory_of_their_own() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    kept = parameter.data
    array = kept.numpy()
    taken = TakenAlong([parameter], [TensorSpec("weight", (1000,), torch.float32)])
    parameter.data = torch.full((1000,), 2.0)
    taken.follow()
    parameter.data.fill_(3.0)
    assert torch.equal(kept, torch.full((1000,), 3.0))
    assert np.array_equal(array, np.ones(1000))
    assert kept.untyped_storage().data_ptr() != array.ctypes.data
