"""A model that is put back, whatever a script's evaluation does with it: rounds its weights, or takes others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.strategies.replica import named_parameters_of


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards parameters and buffers are the tensors that they were, hold what they held, and require gradients
    where they did. Takes as much memory as the model meanwhile."""
    places: list[tuple[Any, dict[str, Any]]] = [
        (own, dict(own)) for each in model.modules() for own in (each._parameters, each._buffers)
    ]
    parameters = [parameter for _, parameter in named_parameters_of(model)]
    tensors = [*parameters, *model.buffers()]
    before = [(tensor.data, tensor.detach().clone()) for tensor in tensors]
    need_gradients = [parameter.requires_grad for parameter in parameters]
    try:
        yield
    finally:
        for own, held in places:
            if own.keys() != held.keys() or any(own[name] is not held[name] for name in held):
                own.clear()
                own.update(held)
        with torch.no_grad():
            for tensor, (own_data, value) in zip(tensors, before, strict=True):
                if tensor.data_ptr() != own_data.data_ptr() or tensor.shape != own_data.shape:
                    tensor.data = own_data
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for parameter, needs in zip(parameters, need_gradients, strict=True):
            parameter.requires_grad_(needs)
