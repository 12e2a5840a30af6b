"""Batch norm normalises each worker's own batch: the equal of N workers is one process with N replicas."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.models import build as build_model
from tests.conformance import local_engine
from tests.conformance.reference import part_of
from tests.conformance.scripts import (
    NUM_CLASSES,
    assert_close,
    launched,
    momentum,
    plain_step,
)
from tests.conformance.test_equivalence import STRATEGIES

RESNET_BATCH_SIZE = 2


def resnet(dtype: torch.dtype) -> nn.Module:
    return build_model("resnet18", num_classes=NUM_CLASSES).to(dtype)


def resnet_loader(num_steps: int, dtype: torch.dtype) -> DataLoader[Any]:
    """Images of shape (3, 16, 16): an epoch is `num_steps` steps of two workers."""
    generator = torch.Generator().manual_seed(5)
    count = 2 * RESNET_BATCH_SIZE * num_steps
    images = torch.randn(count, 3, 16, 16, generator=generator).to(dtype)
    labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=RESNET_BATCH_SIZE, shuffle=True)


def train_resnet(worker: Any, *, num_steps: int, dtype: torch.dtype) -> Any:
    model = resnet(dtype)
    loader = resnet_loader(num_steps, dtype)
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader)
    for batch in loader:
        plain_step(model, optimizer, batch)
    return model


@functools.cache
def train_resnet_replicas(num_steps: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two replicas in one process, each with its worker's batches; both step with their mean gradient."""
    torch.manual_seed(0)
    models = [resnet(dtype)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [momentum(model.parameters()) for model in models]
    loader = resnet_loader(num_steps, dtype)
    parts = [part_of(loader, rank, 2, 0).batches(0) for rank in range(2)]
    for batches in zip(*parts, strict=True):
        for model, batch in zip(models, batches, strict=True):
            model.zero_grad()
            x, y = loader.dataset[list(batch.samples)]
            F.cross_entropy(model(x), y).backward()
        for shared in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([parameter.grad for parameter in shared]).mean(dim=0)
            for parameter in shared:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    states = [model.state_dict() for model in models]
    means = {name: torch.stack([state[name] for state in states]).double().mean(dim=0) for name in states[0]}
    return {name: mean.to(states[0][name].dtype) for name, mean in means.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "dtype", "tolerance"),
    [
        pytest.param(20, torch.float64, {"rtol": 1e-7, "atol": 1e-9}, id="20 steps in float64"),
        pytest.param(1, torch.float32, {"rtol": 1e-5, "atol": 1e-6}, id="1 step in float32"),
        pytest.param(2, torch.float32, {"rtol": 1.5e-2, "atol": 1.5e-2}, id="2 steps in float32"),
    ],
)
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp", "ps-bsp-3"])
def test_resnet_equals_replicas_with_their_own_batch_norm(
    strategy: str, num_steps: int, dtype: torch.dtype, tolerance: Mapping[str, Any], tmp_path: Path
) -> None:
    """SGD with momentum: 20 steps in float64, and the first ones in float32.

    Batch norm over two images, and units that switch on and off, make this training chaotic: rounding grows from step
    to step. Let every weight differ in its last bit at the start. In float64 that comes to 2e-10 after 20 steps. In
    float32 it comes to 2e-7 after one step, to as much as 6e-3 after two, where leaving out the momentum makes 4e-2,
    and after 20 the two runs have nothing in common.
    """
    name, options = STRATEGIES[strategy]
    program = partial(launched, partial(train_resnet, num_steps=num_steps, dtype=dtype))
    result = local_engine.run(program, strategy=name, options=options, workers=2, out=tmp_path)
    assert result.iteration == num_steps
    assert_close(result.model_state(), train_resnet_replicas(num_steps, dtype), tolerance)
