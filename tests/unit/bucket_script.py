"""A script whose gradients lie in buckets, and the gradients that it should have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.buckets import GradientBuckets
from paceline.layout import TensorSpec, in_buckets

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Script:
    """A model with its buckets, and what they announced."""

    def __init__(self, model: nn.Module, *, bucket_bytes: int = 100) -> None:
        self.model = model
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        self.names = list(named)
        specs = [TensorSpec(n, tuple(p.shape), p.dtype) for n, p in named.items()]
        layout = in_buckets(specs, bucket_bytes=bucket_bytes)
        self.announced: list[int | str] = []
        self.buckets = GradientBuckets(
            self.parameters,
            layout,
            torch.zeros(layout.num_bytes, dtype=torch.uint8),
            on_bucket=self.announced.append,
            on_backward_end=lambda: self.announced.append("end"),
        )

    @property
    def whole_pass(self) -> list[int | str]:
        return [*range(len(self.buckets.buckets)), "end"]

    def are_views(self) -> bool:
        return all(p.grad is view for p, view in zip(self.parameters, self.buckets.views, strict=True))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).sum().backward()


def reference(*inputs: Tensor) -> list[Tensor]:
    """Gradients of a model without buckets, summed over the inputs."""
    model = mlp()
    for x in inputs:
        backward(model, x)
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_gradients(script: Script, expected: Sequence[Tensor]) -> None:
    assert script.are_views()
    for view, value in zip(script.buckets.views, expected, strict=True):
        torch.testing.assert_close(view, value, rtol=1e-6, atol=1e-7)


X = torch.linspace(-1, 1, 6).view(2, 3)


def clear_to_none(script: Script) -> None:
    script.model.zero_grad(set_to_none=True)


class Branches(nn.Module):
    """Heads that are added up in an order that each call chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 7) for _ in range(6))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        total = torch.zeros(())
        for index in order:
            total = self.heads[index](x + total).tanh().sum()
        return total
