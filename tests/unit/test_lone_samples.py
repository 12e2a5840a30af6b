"""The watch over batch norm while a batch of one sample is out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.training.lone_samples import LoneSamples
from paceline.training.sharding import Place

ONE = torch.ones(1, 3)


def test_the_last_batch_of_one_sample_is_named_and_forgotten() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    watch = LoneSamples(model, rank=2)
    watch.expect("first", Place(0, 4), num_samples=1)
    watch.expect("second", Place(0, 4), num_samples=8)
    with pytest.raises(UsageError, match=r"rank 2: batch 5 of epoch 0 leaves '0' one value"):
        model[0](ONE)
    watch.expect("first", Place(1, 0), num_samples=8)
    assert not model[0]._forward_pre_hooks
    watch.expect("second", Place(1, 6), num_samples=1)
    with pytest.raises(UsageError, match=r"rank 2: batch 7 of epoch 1"):
        model[0](ONE)
    watch.close()
    assert not model[0]._forward_pre_hooks
