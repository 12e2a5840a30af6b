"""Scripts that hold several batches at a time, of which the last one is smaller: found by a hunt, and kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.conformance.odd_data import batches_of_a_class
from tests.conformance.odd_hunted import train
from tests.conformance.odd_recipes import loss_of
from tests.conformance.scripts import loader_of, momentum, perceptron, samples


def with_tail(worker: Any) -> DataLoader[Any]:
    return loader_of(samples(91))


def in_chunks_twice(batches: Any) -> Iterator[Any]:
    """Asks for four batches, and goes through them twice, as policy gradients do."""
    remaining = iter(batches)
    while chunk := list(itertools.islice(remaining, 4)):
        yield from chunk
        yield from chunk


def with_the_one_before(worker: Any, *, in_one_loss: bool) -> nn.Module:
    """Trains on each batch, and once more on the one before it, also on that of the epoch before."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), with_tail(worker))
    before: Any = None
    for batch in itertools.chain(loader, loader):
        optimizer.zero_grad()
        losses = [loss_of(model, batch)]
        if not in_one_loss:
            losses.pop().backward()
        if before is not None:
            losses.append(loss_of(model, before))
        if losses:
            torch.stack(losses).sum().backward()
        optimizer.step()
        before = batch
    return model


class Told:
    """What a model gives, of a kind of the script's own."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class Untold:
    """As that, which nobody can look into."""

    __slots__ = ("output",)

    def __init__(self, output: Tensor) -> None:
        self.output = output


class Telling(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.kind = perceptron(), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(self.inner(x))


def losses_first(worker: Any, *, kind: Callable[[Tensor], Any]) -> nn.Module:
    """Computes the losses of two batches, and then calls backward on one after the other."""
    model: Any = Telling(kind)
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), with_tail(worker))
    remaining = itertools.chain(loader, loader)
    while pair := list(itertools.islice(remaining, 2)):
        optimizer.zero_grad()
        for loss in [nn.functional.cross_entropy(model(x).output, y) for x, y, _ in pair]:
            loss.backward()
        optimizer.step()
    return model


def beside_gradients_of_another(worker: Any) -> nn.Module:
    """Looks at the gradients of one batch, and trains on the next."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), with_tail(worker))
    batches = itertools.chain(loader, loader)
    for one, other in zip(batches, batches, strict=True):
        worker.log(norm=torch.autograd.grad(loss_of(model, one), list(model.parameters()))[0].norm())
        optimizer.zero_grad()
        loss_of(model, other).backward()
        optimizer.step()
    return model


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "chunks twice": partial(train, loader=with_tail, way=in_chunks_twice),
    "chunks of a class twice": partial(train, loader=batches_of_a_class, way=in_chunks_twice),
    "the one before again": partial(with_the_one_before, in_one_loss=False),
    "the one before in one loss": partial(with_the_one_before, in_one_loss=True),
    "losses first, outputs of a class": partial(losses_first, kind=Told),
    "losses first, outputs of a closed class": partial(losses_first, kind=Untold),
    "beside gradients of another": beside_gradients_of_another,
}
