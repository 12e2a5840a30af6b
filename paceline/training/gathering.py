"""Tensors of all workers in one loss, with their gradients."""

from typing import Any

import torch
from torch import Tensor

from paceline.comm.base import Collective


def gathered_with_gradients(tensor: Tensor, collective: Collective) -> list[Tensor]:
    """Every worker's tensor, in rank order. Collective call, and so is the backward pass: each worker gets the sum of
    the gradients that all have for its tensor. Workers average gradients of parameters after that, so what they step
    with is the gradient of the mean of their losses."""
    found: tuple[Tensor, ...] = _Gathered.apply(tensor, collective)  # type: ignore[no-untyped-call]
    return list(found)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, collective: Collective) -> tuple[Tensor, ...]:
        context.collective = collective
        return tuple(collective.all_gather(tensor.detach()))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return context.collective.reduce_scatter([each.contiguous() for each in gradients]), None
