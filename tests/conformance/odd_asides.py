"""What scripts do beside their steps: in evaluations, with their loaders, at the run's end, and with tensors of their
own. Found by a fourth hunt, and kept."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, default_collate

from tests.conformance.odd_habits import own_loop
from tests.conformance.odd_hunted import Run, train
from tests.conformance.odd_recipes import loss_of
from tests.conformance.scripts import BATCH_SIZE, loader_of, momentum, perceptron, plain_step, samples

# --- evaluations ----------------------------------------------------------------------------------------------------


def judged(worker: Any, *, judge: Callable[[nn.Module], object]) -> nn.Module:
    @worker.evaluation
    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.enable_grad():
            judge(model)
        return {"found": 1.0}

    return train(worker)


def reads_prepared(worker: Any) -> nn.Module:
    """How good the model is on what it trains on."""
    given: list[Any] = []

    @worker.evaluation
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": sum(float(loss_of(model, batch)) for batch in itertools.chain(*given))}

    return train(worker, prepared=lambda run: given.append(run.loader))


def asks_others(worker: Any) -> nn.Module:
    return judged(worker, judge=lambda model: worker.all_reduce(torch.ones(1)))


def adapt(model: nn.Module) -> None:
    """Training at test time."""
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        plain_step(model, optimizer, samples(8)[:])


def adapt_copy(model: nn.Module) -> None:
    adapt(copy.deepcopy(model))


def probe(model: nn.Module) -> None:
    """A linear layer is trained on what the model gives, with a loader and an optimizer of its own."""
    layer = nn.Linear(4, 4).double()
    optimizer = SGD(layer.parameters(), lr=0.1)
    for x, y, _ in DataLoader(samples(24), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(layer(model(x).detach()), y).backward()
        optimizer.step()


def sharpness(model: nn.Module) -> None:
    """Gradients of the model and of its inputs, kept apart."""
    x, y, _ = samples(8)[:]
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    torch.autograd.grad(loss, [x, *model.parameters()])


# --- loaders, and the run's end -------------------------------------------------------------------------------------


def collate_otherwise(run: Run) -> None:
    run.loader.collate_fn = lambda items: [3 * default_collate(items)[0], *default_collate(items)[1:]]


class FirstOnly(DataLoader[Any]):
    """Draws its order by itself."""

    @property
    def _index_sampler(self) -> Any:
        return [[0, 1, 2, 3], [4, 5, 6, 7]]


class Counted(DataLoader[Any]):
    epoch = 0

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.epoch = 0


def count(run: Run) -> None:
    run.loader.epoch += 1


def by_next(worker: Any, *, way: Callable[[Any], Iterator[Any]], count: int = 50) -> nn.Module:
    """Steps are counted, and batches are asked for one by one."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    batches = way(loader)
    for _ in range(count):
        plain_step(model, optimizer, next(batches))
    return model


class Anew:
    """Begins a loader anew when it has ended."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


def anew(loader: Any) -> Iterator[Any]:
    """The same in a generator, where torch's own words come of it."""
    batches = Anew(loader)
    while True:
        yield next(batches)


# --- tensors of the script's own ------------------------------------------------------------------------------------


def scaled(worker: Any, *, is_joint: bool = False) -> nn.Module:
    """A temperature that is no parameter, changed by the script's own rule."""
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)

    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(factor * model(batch[0]), batch[1]).backward()
        optimizer.step()
        assert factor.grad is not None
        gradient = factor.grad.clone()
        if is_joint and hasattr(worker, "all_reduce"):
            worker.all_reduce(gradient, op="mean")
        with torch.no_grad():
            factor.sub_(0.1 * gradient)
        factor.grad = None

    return own_loop(worker, step=step)


def beside_own_model(worker: Any, *, says_so: bool) -> nn.Module:
    """A random network to learn from (novelty), which each rank has drawn for itself after `prepare`."""
    kept: list[nn.Module] = []

    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
        if not kept:
            kept.append(perceptron())
            for parameter in kept[0].parameters():
                parameter.differs_by_rank = says_so  # type: ignore[attr-defined]
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), kept[0](batch[0])).backward()
        optimizer.step()

    return own_loop(worker, step=step)


def replayed(worker: Any) -> nn.Module:
    """Each batch goes by twice, with a change of each of its places that goes on from batch to batch (Shafahi et al.,
    2019)."""
    change = torch.zeros(2 * BATCH_SIZE, 1, 8, 8, dtype=torch.float64, requires_grad=True)

    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0] + change[: len(batch[0])]), batch[1]).backward()
            optimizer.step()
            assert isinstance(change.grad, Tensor)
            with torch.no_grad():
                change.add_(0.01 * change.grad.sign()).clamp_(-0.1, 0.1)
            change.grad.zero_()

    return own_loop(worker, step=step)


EVALUATIONS: dict[str, Callable[[Any], nn.Module]] = {
    "reads the prepared loader": reads_prepared,
    "asks others": asks_others,
    "adapts": partial(judged, judge=adapt),
    "adapts a copy": partial(judged, judge=adapt_copy),
    "probes": partial(judged, judge=probe),
    "sharpness": partial(judged, judge=sharpness),
}
SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "collated otherwise": partial(train, prepared=collate_otherwise),
    "collated otherwise, later": partial(train, passed=collate_otherwise),
    "an order of its class": partial(train, loader=lambda worker: FirstOnly(samples(), batch_size=BATCH_SIZE)),
    "expanded": partial(train, before=lambda run: run.model.register_buffer("ones", torch.ones(1).expand(4))),
    "replayed": replayed,
    "scaled together": partial(scaled, is_joint=True),
}
