"""Training that hardly computes: gradients as large as a reference model's, so that a step is an exchange.

`python -m peers.exchange` prints the seconds of steps without any exchange, as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from paceline.models import build
from paceline.models.resnet18 import resnet18

LEARNING_RATE = 1e-6


class GradientSource(nn.Module):
    """The parameters of a reference model, each with a gradient that costs one pass over it."""

    def __init__(self, model: str, *, width: int | None = None) -> None:
        """Args: width: of resnet18, other than its own."""
        super().__init__()
        torch.manual_seed(0)
        built = build(model) if width is None else resnet18(width=width)
        self.weights = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in built.parameters()])

    def forward(self, inputs: Tensor) -> Tensor:
        """A loss of shape (); `inputs` has any shape."""
        return inputs.mean() * torch.stack([weight.sum() for weight in self.weights]).sum()


@functools.cache
def gradient_bytes(model: str) -> int:
    """What one worker has to exchange a step."""
    return num_bytes(build(model).parameters())


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def make_step(model: nn.Module) -> Callable[[], None]:
    """One step as a script takes it."""
    optimizer = make_optimizer(model)
    batch = torch.ones(1)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    return step


def time_steps(step: Callable[[], None], num_steps: int) -> list[float]:
    """Seconds of each."""
    durations_s = []
    for _ in range(num_steps):
        began_s = time.perf_counter()
        step()
        durations_s.append(time.perf_counter() - began_s)
    return durations_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    print(json.dumps(time_steps(make_step(GradientSource(args.model)), args.steps)))


if __name__ == "__main__":
    main()
