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


class Coder(nn.Module):
    """Classes, from a code of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh()).double()
        self.head = nn.Linear(16, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]


def of_parts(batches: list[Any], model: Any) -> list[Tensor]:
    """A loss of the whole model, one of its encoder on another batch, and one of two parts."""
    (x, y, _), (other, labels, _) = batches
    code = model.encoder(other)
    return [
        nn.functional.cross_entropy(model(x), y),
        code.square().mean(),
        nn.functional.cross_entropy(model.head(code.tanh()), labels),
    ]


def in_parts(worker: Any, *, last_first: bool = False, in_one_loss: bool = False) -> nn.Module:
    """Takes two batches a step, and calls parts of its model by themselves."""
    model: Any = Coder()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), with_tail(worker))
    remaining = itertools.chain(loader, loader)
    while pair := list(itertools.islice(remaining, 2)):
        optimizer.zero_grad()
        losses = of_parts(pair[::-1] if last_first else pair, model)
        losses = [losses[0], losses[1] + losses[2]]
        if in_one_loss:
            losses = [losses[0] + losses[1]]
        for loss in losses:
            loss.backward()
        optimizer.step()
    return model


def with_a_copy(worker: Any, *, in_one_loss: bool = False, copy_first: bool = False) -> nn.Module:
    """Keeps a copy of the batch before, as on another device, and trains on it again beside the next one."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), with_tail(worker))
    before: Any = None
    for batch in itertools.chain(loader, loader):
        optimizer.zero_grad()
        losses = [loss_of(model, each) for each in (batch, before) if each is not None]
        for loss in [torch.stack(losses).sum()] if in_one_loss else losses[::-1] if copy_first else losses:
            loss.backward()
        optimizer.step()
        before = [tensor.clone() for tensor in batch]
        del batch
    return model


def shortest_first(batches: Any) -> Iterator[Any]:
    """Reads an epoch, and trains on its last batch first."""
    return iter(sorted(batches, key=lambda batch: len(batch[0])))


def left_open(batches: Any) -> Iterator[Any]:
    """Takes a few batches, as to find a learning rate, keeps that iterator, and then goes through all."""
    few = iter(batches)
    yield from itertools.islice(few, 3)
    yield from batches
    del few


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "chunks twice": partial(train, loader=with_tail, way=in_chunks_twice),
    "chunks of a class twice": partial(train, loader=batches_of_a_class, way=in_chunks_twice),
    "the one before again": partial(with_the_one_before, in_one_loss=False),
    "the one before in one loss": partial(with_the_one_before, in_one_loss=True),
    "losses first, outputs of a class": partial(losses_first, kind=Told),
    "losses first, outputs of a closed class": partial(losses_first, kind=Untold),
    "beside gradients of another": beside_gradients_of_another,
    "shortest first": partial(train, loader=with_tail, way=shortest_first),
    "a pass left open": partial(train, loader=with_tail, way=left_open),
    "in parts": in_parts,
    "in parts, the last one whole": partial(in_parts, last_first=True),
    "in parts, in one loss": partial(in_parts, in_one_loss=True),
    "with a copy of the one before": with_a_copy,
    "with a copy of the one before, first": partial(with_a_copy, copy_first=True),
    "with a copy of the one before in one loss": partial(with_a_copy, in_one_loss=True),
}
