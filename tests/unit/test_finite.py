"""What is looked at of gradients before a worker steps by itself."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from paceline.strategies import finite


def holding(*gradients: Tensor) -> list[nn.Parameter]:
    found = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        found.append(parameter)
    return found


@pytest.mark.parametrize("value", [1.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("size", [4, 2**15])
@pytest.mark.parametrize("form", ["plain", "expanded", "transposed"])
def test_gradients_of_any_form_are_seen(value: float, size: int, form: str) -> None:
    plain = torch.full((size,), value)
    forms = {"plain": plain, "expanded": plain[:1].expand(size), "transposed": plain.view(2, -1).t()}
    parameters = holding(torch.ones(3), forms[form])
    assert finite._seem_finite(parameters, are_real_on_cpu=True) is (value == 1.0)
    assert finite._seem_finite(holding(torch.ones(3)), are_real_on_cpu=True)  # nothing is left of what was found


def test_it_goes_with_any_default_device_and_type() -> None:
    assert finite.__spec__ is not None
    spec = importlib.util.spec_from_file_location("finite_elsewhere", finite.__spec__.origin)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            spec.loader.exec_module(module)
    finally:
        torch.set_default_dtype(torch.float32)
    assert module._seem_finite(holding(torch.ones(4)), are_real_on_cpu=True)
    assert not module._seem_finite(holding(torch.tensor([1.0, float("nan")])), are_real_on_cpu=True)
