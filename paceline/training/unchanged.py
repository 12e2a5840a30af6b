"""A model that is put back, whatever a script does with it meanwhile: rounds its weights, or takes others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.strategies.replica import named_parameters_of


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards the model is as before. Takes as much memory as the model meanwhile."""
    put_back = remembered(model)
    try:
        yield
    finally:
        put_back()


def remembered(model: nn.Module) -> Callable[[], None]:
    """What gives the model the parameters and buffers that it has now: the same tensors, which hold what they hold and
    require gradients where they do."""
    places: list[tuple[Any, dict[str, Any]]] = [
        (own, dict(own.items())) for each in model.modules() for own in (each._parameters, each._buffers)
    ]
    need_gradients = [(parameter, parameter.requires_grad) for _, parameter in named_parameters_of(model)]
    put_values_back = remembered_values(model)

    def put_back() -> None:
        for own, held in places:
            if own.keys() != held.keys() or any(own[name] is not held[name] for name in held):
                own.clear()
                own.update(held)
        put_values_back()
        for parameter, needs in need_gradients:
            parameter.requires_grad_(needs)

    return put_back


def remembered_values(model: nn.Module) -> Callable[[], None]:
    """What has the tensors that are the model's now hold what they hold, wherever they are then."""
    tensors = [*(parameter for _, parameter in named_parameters_of(model)), *model.buffers()]
    before = [(tensor.data, tensor.detach().clone()) for tensor in tensors]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, (own_data, value) in zip(tensors, before, strict=True):
                if tensor.data_ptr() != own_data.data_ptr() or tensor.shape != own_data.shape:
                    tensor.data = own_data
                if not torch.equal(tensor, value):
                    tensor.copy_(value)

    return put_back
