"""What scripts keep, catch, and change in mid-run: found by a fourth hunt, and kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_sequence
from torch.optim import Adam, Optimizer, Rprop
from torch.optim.lr_scheduler import CyclicLR
from torch.utils.data import DataLoader, Dataset

from paceline.errors import UsageError
from tests.conformance.odd_habits import own_loop
from tests.conformance.odd_hunted import AT, Run, train
from tests.conformance.odd_recipes import loss_of
from tests.conformance.scripts import BATCH_SIZE, NUM_CLASSES, loader_of, momentum, perceptron, samples


def itself(parameter: nn.Parameter) -> Any:
    return parameter.grad


def detached(parameter: nn.Parameter) -> Any:
    return parameter.grad.detach()  # type: ignore[union-attr]


def data(parameter: nn.Parameter) -> Any:
    return parameter.grad.data  # type: ignore[union-attr]


def two_tasks(model: nn.Module, optimizer: Optimizer, batch: Any, *, keep: Callable[[nn.Parameter], Any]) -> None:
    """Keeps the gradients of one task while those of the other are computed."""
    optimizer.zero_grad()
    output = model(batch[0])
    F.cross_entropy(output, batch[1]).backward(retain_graph=True)
    first = list(map(keep, model.parameters()))
    optimizer.zero_grad()
    output.square().mean().backward()
    for parameter, kept in zip(model.parameters(), first, strict=True):
        parameter.grad = 0.7 * kept + 0.3 * parameter.grad
    optimizer.step()


def with_those_before(run: Run, *, keep: Callable[[nn.Parameter], Any]) -> None:
    """Adds half of the last step's gradients."""
    mine = list(map(keep, run.model.parameters()))
    for parameter, before in zip(run.model.parameters(), getattr(run, "before", []), strict=False):
        parameter.grad = parameter.grad + 0.5 * before
    run.before = mine  # type: ignore[attr-defined]


def catching(worker: Any, *, step: Callable[..., object]) -> nn.Module:
    """Goes on with the next batch, whatever was wrong. There is none after a refusal."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    run, is_refused = Run(worker, model, optimizer), False
    for batch in itertools.chain(*[loader] * 4):
        assert not is_refused
        run.number += 1
        try:
            step(run, batch)
        except Exception as error:
            is_refused = isinstance(error, UsageError)
            optimizer.zero_grad()
    return model


def summed(run: Run, batch: Any) -> None:
    run.optimizer.zero_grad()
    F.cross_entropy(run.model(batch[0]), batch[1], reduction="sum").backward()
    run.optimizer.step()


def changed_alone(run: Run, batch: Any) -> None:
    run.optimizer.zero_grad()
    loss_of(run.model, batch).backward()
    run.optimizer.step()
    if run.worker.rank and run.number == AT:
        with torch.no_grad():
            next(run.model.parameters()).add_(0.1)


def bad_batch(run: Run, batch: Any) -> None:
    if run.worker.rank and run.number == AT:
        raise RuntimeError("out of memory")
    changed_alone(run, batch)


def pruned(run: Run, *, for_good: bool) -> None:
    if run.epoch == 0:
        prune.l1_unstructured(run.model[1], "weight", amount=0.2)  # type: ignore[index,no-untyped-call]
        if for_good:
            prune.remove(run.model[1], "weight")  # type: ignore[index,no-untyped-call]


def unfrozen(run: Run) -> None:
    run.model[1].requires_grad_(True)  # type: ignore[index]


def freeze(run: Run) -> None:
    run.model[1].requires_grad_(False)  # type: ignore[index]


def with_schedule(run: Run) -> None:
    """A cycle of rate and momentum."""
    run.cycle = CyclicLR(run.optimizer, 0.001, 0.05, step_size_up=3)  # type: ignore[attr-defined]


def turn(run: Run) -> None:
    run.cycle.step()  # type: ignore[attr-defined]


class Drawn(nn.Module):
    """Each rank draws by itself whether a layer is used."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.aside = perceptron(), nn.Linear(64, NUM_CLASSES).double()

    def forward(self, x: Tensor) -> Any:
        return self.net(x) + (self.aside(x.flatten(1)) if random.random() < 0.5 else 0)


class Truncated(nn.Module):
    """A recurrent network that is stepped several times a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 4).double(), nn.Linear(4, NUM_CLASSES).double()

    def forward(self, x: Tensor, hidden: Tensor) -> Any:
        return self.cell(x, hidden)


def truncated(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    hidden = torch.zeros(len(x), 4, dtype=torch.float64)
    for part in x[:, 0].split(4, dim=1):
        hidden = hidden.detach()
        for moment in part.unbind(1):
            hidden = model(moment, hidden)
        optimizer.zero_grad()
        F.cross_entropy(model.head(hidden), y).backward()
        optimizer.step()


def in_pieces(worker: Any) -> nn.Module:
    model = Truncated()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples(91)))
    for x, y, _ in itertools.chain(loader, loader):
        truncated(model, optimizer, x, y)
    return model


class Ragged(Dataset[Any]):
    """Sequences of 2 to 7 rows."""

    def __len__(self) -> int:
        return 91

    def __getitem__(self, index: int) -> Any:
        x, y, _ = samples(91)[index]
        return x.view(8, 8)[: 2 + index % 6], y


def packed(worker: Any) -> DataLoader[Any]:
    def collate(items: Any) -> Any:
        items = sorted(items, key=lambda item: -len(item[0]))
        return pack_sequence([x for x, _ in items]), torch.stack([y for _, y in items])

    return DataLoader(Ragged(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)


class OfSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(8, 4).double(), nn.Linear(4, NUM_CLASSES).double()

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x)[1][0])


def weights_outside(worker: Any) -> nn.Module:
    """The optimizer has a parameter that is of no module."""
    model, weights = perceptron(), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    worker.prepare(model, momentum([*model.parameters(), weights]), loader_of(samples()))
    return model


def one_after_the_other(worker: Any) -> nn.Module:
    """Begins with one optimizer, and goes on with another."""
    model = perceptron()
    adam, sgd = Adam(model.parameters(), lr=0.01), momentum(model.parameters())
    model, adam, sgd, data = worker.prepare(model=model, adam=adam, sgd=sgd, data=loader_of(samples()))
    for optimizer in (adam, sgd):
        for batch in data:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model


def all_in_a_list(batches: Any) -> Any:
    """All batches of a pass, the smaller one among them, in another order."""
    kept = list(batches)
    random.Random(3).shuffle(kept)
    return iter(kept)


def with_tail(worker: Any) -> DataLoader[Any]:
    return loader_of(samples(91))


def in_another_graph(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """A penalty of gradients that others have taken the place of when it goes backward."""
    x, y, *_ = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    penalty = torch.stack([(parameter * parameter.grad).sum() for parameter in model.parameters()]).sum()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    penalty.backward()
    optimizer.step()


def share_gradients(run: Run) -> None:
    if run.number == AT:
        for parameter in run.model.parameters():
            parameter.grad.share_memory_()  # type: ignore[union-attr]


def halve_data(run: Run) -> None:
    """Of gradients, as older scripts do."""
    for parameter in run.model.parameters():
        parameter.grad.data = 0.5 * parameter.grad.data  # type: ignore[union-attr]


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "gradients in another graph": partial(own_loop, step=in_another_graph),
    "gradients shared": partial(train, backward=share_gradients),
    "gradients' data replaced": partial(train, backward=halve_data),
    "gradients kept": partial(own_loop, step=partial(two_tasks, keep=itself)),
    "gradients of before kept": partial(train, backward=partial(with_those_before, keep=itself)),
    "gradients kept detached": partial(own_loop, step=partial(two_tasks, keep=detached)),
    "gradients of before kept detached": partial(train, backward=partial(with_those_before, keep=detached)),
    "gradients' data kept": partial(own_loop, step=partial(two_tasks, keep=data)),
    "gradients' data of before kept": partial(train, backward=partial(with_those_before, keep=data)),
    "a sum, caught": partial(catching, step=summed),
    "a change, caught": partial(catching, step=changed_alone),
    "a bad batch, caught": partial(catching, step=bad_batch),
    "pruned later": partial(train, passed=partial(pruned, for_good=False)),
    "pruned later, for good": partial(train, passed=partial(pruned, for_good=True)),
    "frozen later": partial(train, passed=freeze),
    "unfrozen later": partial(train, before=freeze, passed=unfrozen),
    "a cycle of rate and momentum": partial(train, prepared=with_schedule, stepped=turn),
    "rprop": partial(train, optimizer=partial(Rprop, lr=0.01)),
    "layers drawn by rank": partial(train, model=Drawn),
    "in pieces": in_pieces,
    "packed sequences": partial(train, model=OfSequences, loader=packed),
    "loss weights outside": weights_outside,
    "one optimizer after the other": one_after_the_other,
    "all in a list": partial(train, loader=with_tail, way=all_in_a_list),
}
