"""What trainers do with copies of a model and an optimizer, and with the models themselves."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint_sequential

from tests.conformance.odd_habits import own_loop
from tests.conformance.odd_hunted import AT, Run, train
from tests.conformance.odd_recipes import loss_of
from tests.conformance.scripts import BATCH_SIZE, NUM_CLASSES, momentum, perceptron, samples

# --- copies of the model and the optimizer --------------------------------------------------------------------------


def step_copies(run: Run) -> None:
    """Tries a step on copies of both, as line searches do."""
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    optimizer.zero_grad()
    model(samples().tensors[0][:BATCH_SIZE]).square().mean().backward()
    optimizer.step()


def pickle_both(run: Run) -> None:
    """Saves whole objects."""
    file = io.BytesIO()
    torch.save((run.model, run.optimizer), file)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=False)
    model(samples().tensors[0][:BATCH_SIZE]).square().mean().backward()
    optimizer.step()


def save_on_first(run: Run) -> None:
    if run.worker.rank == 0 and run.number == AT:
        torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, io.BytesIO())


def judge_on_first(run: Run) -> None:
    """A validation loss on one rank alone, with its own dropout."""
    if run.worker.rank == 0:
        with torch.no_grad():
            F.dropout(run.model(samples().tensors[0]), 0.5)


def smoothed(worker: Any) -> nn.Module:
    """A moving average whose decay grows, and which is the model in the end (timm)."""
    kept: dict[str, Any] = {}

    def prepared(run: Run) -> None:
        kept["mean"] = copy.deepcopy(run.model).eval()

    def stepped(run: Run) -> None:
        decay = min(0.9, (1 + run.number) / (10 + run.number))
        for mean, own in zip(kept["mean"].state_dict().values(), run.model.state_dict().values(), strict=True):
            mean.copy_(decay * mean + (1 - decay) * own)

    model = train(worker, prepared=prepared, stepped=stepped)
    model.load_state_dict(kept["mean"].state_dict())
    return model


class Interpolated:
    """Around the prepared optimizer: every third step goes half the way back (lookahead)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inside, self.count = optimizer, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.inside.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.inside.step()
        self.count += 1
        if self.count % 3 == 0:
            for slow, fast in zip(self.slow, self.inside.param_groups[0]["params"], strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)


def wrap(run: Run) -> None:
    run.optimizer = Interpolated(run.optimizer)  # type: ignore[assignment]


# --- models ---------------------------------------------------------------------------------------------------------


class Targeted(nn.Module):
    """A network and the slow copy that it learns from, both inside."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = perceptron(), perceptron().requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())

    def forward(self, x: Tensor) -> Any:
        return self.online(x) + 0.1 * self.target(x)


def follow(run: Run, *, hard: bool) -> None:
    model: Any = run.model
    if hard and run.number % 4 == 0:
        model.target.load_state_dict(model.online.state_dict())
    if not hard:
        with torch.no_grad():
            for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)


def targeted(parameters: Any) -> Optimizer:
    return momentum([p for p in parameters if p.requires_grad])


def old_norms() -> nn.Module:
    """Weight norm and spectral norm as they were, with hooks that make a plain weight."""
    model = perceptron()
    nn.utils.weight_norm(model[1])  # type: ignore[no-untyped-call]
    nn.utils.spectral_norm(model[3])
    return model


def orthogonal() -> nn.Module:
    model = perceptron()
    parametrizations.orthogonal(model[1])
    return model


def unparametrised(run: Run) -> None:
    if run.number == AT:
        parametrize.remove_parametrizations(run.model[1], "weight")  # type: ignore[index,arg-type]


def cached_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    with parametrize.cached():
        loss = loss_of(model, batch) + 0.1 * model(batch[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Marked(nn.Parameter):
    """A parameter of a library's own class."""


def marked() -> nn.Module:
    model = perceptron()
    model[1].weight = Marked(model[1].weight.detach())
    return model


def register_late(run: Run) -> None:
    if run.number == AT:
        run.model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    if run.number >= AT:
        run.model.seen += 1  # type: ignore[operator]


def grow(run: Run) -> None:
    """A layer more, which the optimizer is told of."""
    if run.number == AT:
        run.model.append(nn.Linear(NUM_CLASSES, NUM_CLASSES).double())  # type: ignore[operator]
        run.optimizer.add_param_group({"params": list(run.model[4].parameters())})  # type: ignore[index]


def without_bias(run: Run) -> None:
    if run.number == AT:
        run.model[3].bias = None  # type: ignore[index,assignment]


def tie_late(run: Run) -> None:
    """The decoder's weight is the encoder's from here on."""
    run.model[3].weight = run.model[5].weight  # type: ignore[index,union-attr]


def square() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)
    ).double()


class Shallow(nn.Module):
    """Stochastic depth that is drawn alike: some steps do without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.count = square(), 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        layers = list(self.layers)  # type: ignore[call-overload]
        for layer in [*layers[:3], *([] if self.count % 3 == 1 else layers[3:6]), layers[6]]:
            x = layer(x)
        return x


class Segmented(nn.Module):
    """Computed anew in the backward pass, a segment at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, x: Tensor) -> Any:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "a step of copies": partial(train, stepped=step_copies),
    "whole objects saved": partial(train, passed=pickle_both),
    "saved by the first rank": partial(train, stepped=save_on_first),
    "judged by the first rank": partial(train, stepped=judge_on_first),
    "smoothed": smoothed,
    "half the way back": partial(train, prepared=wrap),
    "a slow copy inside": partial(train, model=Targeted, optimizer=targeted, stepped=partial(follow, hard=False)),
    "a copy inside, now and then": partial(
        train, model=Targeted, optimizer=targeted, stepped=partial(follow, hard=True)
    ),
    "old norms": partial(train, model=old_norms),
    "orthogonal": partial(train, model=orthogonal),
    "parametrisation removed": partial(train, model=orthogonal, stepped=unparametrised),
    "parametrisation cached": partial(own_loop, step=cached_step),
    "a class of parameters": partial(train, model=marked),
    "a buffer registered late": partial(train, stepped=register_late),
    "a layer more": partial(train, stepped=grow),
    "a bias less": partial(train, stepped=without_bias),
    "tied after": partial(train, model=square, prepared=tie_late),
    "layers left out": partial(train, model=Shallow),
    "in segments": partial(train, model=Segmented),
}
