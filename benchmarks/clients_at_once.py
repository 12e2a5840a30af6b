"""Steps of several clients as one, beside the same steps one client after another: a client step's processor time.

    python benchmarks/clients_at_once.py
    python benchmarks/clients_at_once.py --processes 2

Clients start from one model and go ways of their own, so that their weights are stacked: the script's forward pass maps
over them by `torch.func.vmap`, or its linear layers multiply stacks of matrices (`stacked`), where autograd gives each
gradient the layout of its weight. One thread a process, no loader, batches of ten. Processes, as many as there are
workers, share the cache in which the stacks lie.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from report import tell
from rich.table import Table
from rounds import ratio_of
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.optim import SGD

from paceline.models import build

BATCH_SIZE, RATE = 10, 0.01
ALONE = "alone"
Forward = Callable[[Tensor], Tensor]
Way = Callable[[nn.Module, int], tuple[Forward, list[nn.Parameter]]]
"""How so many clients' models compute, and their parameters."""


def perceptron(*widths: int) -> nn.Sequential:
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


class StackedLinear(torch.autograd.Function):
    """What `vmap` makes of a linear layer has gradients that autograd copies once more, into the weights' layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        return of_x, torch.bmm(gradient.transpose(1, 2), x), gradient.sum(1)


def alone(model: nn.Module, _: int) -> tuple[Forward, list[nn.Parameter]]:
    return model, list(model.parameters())


def mapped(model: nn.Module, num_clients: int) -> tuple[Forward, list[nn.Parameter]]:
    stacks = {
        name: nn.Parameter(each.detach().expand(num_clients, *each.shape).clone())
        for name, each in model.named_parameters()
    }
    of_all = vmap(lambda weights, x: functional_call(model, weights, (x,)))
    return lambda x: of_all(stacks, x.unflatten(0, (num_clients, -1))).flatten(0, 1), list(stacks.values())


def stacked(model: nn.Module, num_clients: int) -> tuple[Forward, list[nn.Parameter]]:
    """For models that have parameters in linear layers only."""
    for parameter in model.parameters():
        parameter.data = parameter.data.expand(num_clients, *parameter.shape).clone()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(_stacked_linear, layer, num_clients)  # type: ignore[method-assign]
    return model, list(model.parameters())


def _stacked_linear(layer: nn.Linear, num_clients: int, x: Tensor) -> Tensor:
    stack = x.unflatten(0, (num_clients, -1))
    found: Tensor = StackedLinear.apply(stack, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return found.flatten(0, 1)


class Task(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of a sample."""
    ways: Mapping[str, Way]
    num_steps: int
    """Of each client in a measurement."""


BOTH: Mapping[str, Way] = {"vmap": mapped, "stacked": stacked}
TASKS = {
    "64-32-10": Task(partial(perceptron, 64, 32, 10), (64,), BOTH, 20),
    "784-10": Task(partial(perceptron, 784, 10), (784,), BOTH, 20),
    "784-64-10": Task(partial(perceptron, 784, 64, 10), (784,), BOTH, 20),
    "2NN: 784-200-200-10": Task(partial(perceptron, 784, 200, 200, 10), (784,), BOTH, 20),
    "CNN of the FedAvg paper": Task(partial(build, "fedavg-cnn"), (1, 28, 28), {"vmap": mapped}, 2),
}


class Steps:
    """As many steps of `num_clients` clients as the task has."""

    def __init__(
        self,
        task: Task,
        way: Way,
        num_clients: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self._num_clients = num_clients
        self._forward, self.parameters = way(task.make().to(dtype), num_clients)
        self._optimizer = SGD(self.parameters, RATE)
        num_samples = num_clients * BATCH_SIZE
        self._x = torch.randn(task.num_steps, num_samples, *task.shape, dtype=dtype)
        self._y = torch.randint(0, 10, (task.num_steps, num_samples))

    def play(self, batches: Iterator[tuple[Tensor, Tensor]] | None = None) -> None:
        for x, y in batches or zip(self._x, self._y, strict=True):
            self._optimizer.zero_grad()
            # A mean over all clients' samples divides each one's gradient by their number.
            (F.cross_entropy(self._forward(x), y) * self._num_clients).backward()
            self._optimizer.step()

    def of_client(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        part = slice(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        return zip(self._x[:, part], self._y[:, part], strict=True)

    def timed_us(self) -> float:
        """A client step's processor time."""
        began_s = time.process_time()
        self.play()
        return (time.process_time() - began_s) / len(self._x) / self._num_clients * 1e6


def require_equal(task: Task, way: Way) -> None:
    """Raises AssertionError where clients together come out other than alone."""
    together = Steps(task, way, 3, torch.float64)
    singles = [Steps(task, alone, 1, torch.float64) for _ in range(3)]
    for number, single in enumerate(singles):
        single.play(together.of_client(number))
    together.play()
    for stack, *each in zip(together.parameters, *(single.parameters for single in singles), strict=True):
        torch.testing.assert_close(stack.detach(), torch.stack([one.detach() for one in each]), rtol=1e-9, atol=1e-12)


def measured(name: str, numbers: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """Microseconds of a client step, one a repeat."""
    torch.set_num_threads(1)
    task = TASKS[name]
    ways = task.ways
    for way in ways.values():
        require_equal(task, way)
    contenders = {ALONE: Steps(task, alone, 1)}
    contenders |= {f"{label}, {number}": Steps(task, ways[label], number) for label in ways for number in numbers}
    for contender in contenders.values():
        contender.play()
    found: dict[str, list[float]] = {label: [] for label in contenders}
    for _ in range(repeats):
        for label, contender in contenders.items():
            found[label].append(contender.timed_us())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 10], help="that go as one")
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS), metavar="MODEL")
    parser.add_argument("--processes", type=int, default=1, help="that do so at the same time")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    table = Table("model", "clients' steps", title=f"A client step, batches of {BATCH_SIZE}", box=None)
    for heading in ("us, median", "times as fast as alone"):
        table.add_column(heading, justify="right")
    facts = {}
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        asked = {name: [(name, args.clients, args.repeats)] * args.processes for name in args.models}
        told = {name: pool.starmap(measured, each, chunksize=1) for name, each in asked.items()}
    for name, of_each in told.items():
        found = facts[name] = {label: [time for each in of_each for time in each[label]] for label in of_each[0]}
        for label, times in found.items():
            table.add_row(name, label, f"{statistics.median(times):.0f}", ratio_of(found[ALONE], times))
    tell([table], {"found_us": facts, "processes": args.processes})


if __name__ == "__main__":
    main()
