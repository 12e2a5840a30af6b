"""Scripts that synchronous strategies must run as one process does with the combined batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.conformance.reference import Script

NUM_SAMPLES, NUM_CLASSES, BATCH_SIZE, NUM_EPOCHS = 96, 4, 4, 2

# Most scripts train in float64: what differs from the reference by more than summing in another order shows at once.
EXACT = {"rtol": 1e-9, "atol": 1e-11}
SINGLE_PRECISION = {"rtol": 1e-4, "atol": 2e-6}


def samples(count: int = NUM_SAMPLES, *, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Images of shape (1, 8, 8), labels, and each sample's index."""
    generator = torch.Generator().manual_seed(11)
    images = torch.randn(count, 1, 8, 8, generator=generator, dtype=dtype)
    return TensorDataset(images, torch.randint(0, NUM_CLASSES, (count,), generator=generator), torch.arange(count))


def loader_of(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)


def perceptron(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES)).to(dtype)


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )


Step = Callable[[nn.Module, Optimizer, Any], object]


def plain_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def train(
    worker: Any,
    *,
    optimizer: Callable[[Any], Optimizer],
    model: Callable[[], nn.Module] = perceptron,
    data: Callable[[], TensorDataset] = samples,
    step: Step = plain_step,
    num_epochs: int = NUM_EPOCHS,
) -> Any:
    """The loop of most scripts below."""
    network = model()
    network, updater, loader = worker.prepare(network, optimizer(network.parameters()), loader_of(data()))
    for _ in range(num_epochs):
        for batch in loader:
            step(network, updater, batch)
    return network


momentum = partial(SGD, lr=0.05, momentum=0.9)


# --- gradients that the script changes -----------------------------------------------------------------------------


def clip_norm_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clip_value_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()


def replace_gradient_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sign() * 0.1
    optimizer.step()


def zero_in_place_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def closure_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    assert torch.is_tensor(optimizer.step(closure))


def two_backwards_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """Accumulates without no_sync: every backward pass exchanges."""
    optimizer.zero_grad()
    output = model(batch[0])
    F.cross_entropy(output, batch[1]).backward(retain_graph=True)
    output.square().mean().backward()
    optimizer.step()


# --- scripts with a loop of their own ------------------------------------------------------------------------------


def accumulate(worker: Any, *, every: int, count: int = NUM_SAMPLES, skips_exchange: bool = True) -> Any:
    """One step for `every` batches, and for those left at an epoch's end."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples(count)))
    for _ in range(NUM_EPOCHS):
        optimizer.zero_grad()
        for number, (x, y, _) in enumerate(loader, 1):
            is_last = number % every == 0 or number == len(loader)
            with worker.no_sync() if skips_exchange and not is_last else nullcontext():
                (F.cross_entropy(model(x), y) / every).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    return model


def accumulate_over_epochs(worker: Any) -> Any:
    """A step may hold gradients of an epoch's last, smaller batch and of the next epoch's first."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples(91)))
    number = 0
    for _ in range(5):
        for x, y, _ in loader:
            number += 1
            with worker.no_sync() if number % 3 else nullcontext():
                F.cross_entropy(model(x), y).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def exchange_too_early(worker: Any) -> Any:
    """The last backward pass before a step is the one without an exchange."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    for _ in range(NUM_EPOCHS):
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with worker.no_sync():
                model(x).square().mean().backward()
            optimizer.step()
    return model


def scale_loss(worker: Any, *, optimizer: Callable[[Any], Optimizer] = momentum, clips: bool = False) -> Any:
    """With a GradScaler; the batch with sample 13 overflows in the first epoch, on the one worker that has it."""
    model = perceptron(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=5)
    data = samples(dtype=torch.float32)
    model, updater, loader = worker.prepare(model, optimizer(model.parameters()), loader_of(data), scaler=scaler)
    for epoch in range(NUM_EPOCHS):
        for x, y, indices in loader:
            updater.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if epoch == 0 and 13 in indices:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(updater)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(updater)
            scaler.update()
    model.register_buffer("scale", torch.tensor(scaler.get_scale()))
    return model


def schedule_before(worker: Any) -> Any:
    """Schedulers made before prepare, stepped once an epoch."""
    model = perceptron()
    optimizer = momentum(model.parameters())
    scheduler = StepLR(optimizer, step_size=1, gamma=0.3)
    model, optimizer, loader = worker.prepare(model, optimizer, loader_of(samples()), scheduler=scheduler)
    for _ in range(3):
        for batch in loader:
            plain_step(model, optimizer, batch)
        scheduler.step()
    return model


def schedule_after(worker: Any, *, optimizer: Callable[[Any], Optimizer]) -> Any:
    """A scheduler made after prepare, stepped once a step; it also cycles momentum, or the first beta."""
    model = perceptron()
    model, updater, loader = worker.prepare(model, optimizer(model.parameters()), loader_of(samples()))
    scheduler = OneCycleLR(updater, max_lr=0.1, epochs=NUM_EPOCHS, steps_per_epoch=len(loader))
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            plain_step(model, updater, batch)
            scheduler.step()
    return model


def two_groups(worker: Any) -> Any:
    """Groups with learning rates, weight decays, betas and schedules of their own."""
    model = perceptron()
    first, second = model[1], model[3]
    groups: list[dict[str, Any]] = [
        {"params": [first.weight, second.bias], "lr": 0.02, "weight_decay": 0.3, "betas": (0.5, 0.9)},
        {"params": [first.bias]},
        {"params": [second.weight], "lr": 0.005, "amsgrad": True},
    ]
    optimizer = AdamW(groups, lr=0.01, weight_decay=0.0)
    scheduler = MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    model, optimizer, loader = worker.prepare(model, optimizer, loader_of(samples()))
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            plain_step(model, optimizer, batch)
        scheduler.step()
    return model


class Tied(nn.Module):
    """The first layer's weights are also the last one's, and a bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 12, dtype=torch.float64)
        self.decoder = nn.Linear(12, 64, bias=False, dtype=torch.float64)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().T.clone())
        self.second = nn.Linear(64, 12, dtype=torch.float64)
        self.second.weight = self.encoder.weight
        self.head = nn.Linear(12, NUM_CLASSES, dtype=torch.float64)
        self.encoder.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(x.flatten(1)))
        output: Tensor = self.head(torch.tanh(self.second(self.decoder(hidden))))
        return output


class MixedDtypes(nn.Module):
    """A bfloat16 layer between float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.middle = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        output: Tensor = self.last(torch.tanh(self.middle(hidden.bfloat16())).float())
        return output


class NormalisedSGD(Optimizer):
    """Divides each tensor's gradient by its norm: an update of one element depends on its whole tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])


class Branches(nn.Module):
    """A sample's index says which of two layers sees it; a third one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.never = (nn.Linear(64, NUM_CLASSES, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        x = x.flatten(1)
        outputs = torch.zeros(len(x), NUM_CLASSES, dtype=torch.float64)
        for layer, mask in ((self.even, indices % 7 < 6), (self.odd, indices % 7 == 6)):
            if mask.any():
                outputs = outputs.index_put((mask,), layer(x[mask]))
        return outputs


def branch_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0], batch[2]), batch[1]).backward()
    optimizer.step()


SCRIPTS: Mapping[str, tuple[Script, Mapping[str, Any]]] = {
    "sgd": (partial(train, optimizer=partial(SGD, lr=0.1)), EXACT),
    "momentum": (partial(train, optimizer=momentum), EXACT),
    "nesterov, weight decay": (
        partial(train, optimizer=partial(SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1)),
        EXACT,
    ),
    "adam": (partial(train, optimizer=partial(Adam, lr=0.01, weight_decay=0.1)), EXACT),
    "adamw": (partial(train, optimizer=partial(AdamW, lr=0.01, weight_decay=0.5)), EXACT),
    "rmsprop": (partial(train, optimizer=partial(RMSprop, lr=0.003, momentum=0.5)), EXACT),
    "adagrad": (partial(train, optimizer=partial(Adagrad, lr=0.05)), EXACT),
    "normalised sgd of the script's own": (partial(train, optimizer=partial(NormalisedSGD, lr=0.02)), EXACT),
    "convolutions in float32": (
        partial(train, optimizer=momentum, model=convnet, data=partial(samples, dtype=torch.float32)),
        SINGLE_PRECISION,
    ),
    "adam in float32": (
        partial(
            train,
            optimizer=partial(Adam, lr=0.003, eps=1e-5),
            model=partial(perceptron, torch.float32),
            data=partial(samples, dtype=torch.float32),
        ),
        SINGLE_PRECISION,
    ),
    "uneven tail": (partial(train, optimizer=momentum, data=partial(samples, 91), num_epochs=3), EXACT),
    "tail of one sample": (partial(train, optimizer=momentum, data=partial(samples, 73), num_epochs=3), EXACT),
    "clip by norm": (partial(train, optimizer=momentum, step=clip_norm_step), EXACT),
    "clip by value": (partial(train, optimizer=momentum, step=clip_value_step), EXACT),
    "clip by norm, uneven tail": (
        partial(train, optimizer=momentum, step=clip_norm_step, data=partial(samples, 91)),
        EXACT,
    ),
    "gradients replaced": (partial(train, optimizer=momentum, step=replace_gradient_step), EXACT),
    "gradients zeroed in place": (partial(train, optimizer=momentum, step=zero_in_place_step), EXACT),
    "closure": (partial(train, optimizer=momentum, step=closure_step), EXACT),
    "two backward passes": (partial(train, optimizer=momentum, step=two_backwards_step), EXACT),
    "two backward passes, uneven tail": (
        partial(train, optimizer=momentum, step=two_backwards_step, data=partial(samples, 91)),
        EXACT,
    ),
    "accumulate": (partial(accumulate, every=3), EXACT),
    "accumulate, exchanging every time": (partial(accumulate, every=3, skips_exchange=False), EXACT),
    "accumulate, uneven tail": (partial(accumulate, every=3, count=91), EXACT),
    "accumulate, uneven tail, exchanging every time": (
        partial(accumulate, every=3, count=91, skips_exchange=False),
        EXACT,
    ),
    "accumulate over epochs": (accumulate_over_epochs, EXACT),
    "exchange before the last backward pass": (exchange_too_early, EXACT),
    "scaler": (scale_loss, SINGLE_PRECISION),
    "scaler and clip": (partial(scale_loss, clips=True), SINGLE_PRECISION),
    "scaler, fused adam": (
        partial(scale_loss, optimizer=partial(Adam, lr=0.003, eps=1e-5, fused=True)),
        SINGLE_PRECISION,
    ),
    "step schedule": (schedule_before, EXACT),
    "one-cycle schedule, momentum": (partial(schedule_after, optimizer=momentum), EXACT),
    "one-cycle schedule, betas": (partial(schedule_after, optimizer=partial(Adam, lr=0.01)), EXACT),
    "two groups": (two_groups, EXACT),
    "tied and frozen": (partial(train, optimizer=momentum, model=Tied), EXACT),
    "mixed dtypes": (
        partial(train, optimizer=momentum, model=MixedDtypes, data=partial(samples, dtype=torch.float32)),
        {"rtol": 0.03, "atol": 0.003},
    ),
}
# Rings differ from all-reduce, and one server from three, in how data moves alone: a few scripts show that.
FOR_EVERY_STRATEGY = ("momentum", "convolutions in float32", "clip by norm, uneven tail", "two groups", "scaler")
WITH_THREE_WORKERS = ("momentum", "convolutions in float32", "uneven tail", "clip by norm, uneven tail")


def launched(script: Script) -> None:
    script(paceline.init())


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Mapping[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, **tolerance, msg=partial("{}: {}".format, name))
