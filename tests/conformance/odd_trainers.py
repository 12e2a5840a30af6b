"""What trainers and libraries of the field do in their steps, optimizers and data: found by a third hunt, and kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ReduceLROnPlateau
from torch.utils.data import DataLoader, Sampler

from tests.conformance.odd_habits import each, own_loop
from tests.conformance.odd_hunted import AT, Run, train
from tests.conformance.odd_recipes import loss_of
from tests.conformance.scripts import BATCH_SIZE, NUM_CLASSES, NUM_SAMPLES, loader_of, momentum, perceptron, samples

# --- steps ----------------------------------------------------------------------------------------------------------


def scaled_by_hand(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """A loss scale as it was before there were scalers."""
    optimizer.zero_grad()
    (1024 * loss_of(model, batch)).backward()
    for parameter in model.parameters():
        parameter.grad /= 1024  # type: ignore[operator]
    optimizer.step()


def main_gradients(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """A hook adds gradients up elsewhere, and the step takes them from there (Megatron)."""
    main: dict[Tensor, Tensor] = {}

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        main[parameter] = main.get(parameter, 0) + parameter.grad.clone()
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in model.parameters()]
    loss_of(model, batch).backward()
    for parameter in model.parameters():
        parameter.grad = main[parameter]
    optimizer.step()
    for hook in hooks:
        hook.remove()


def main_and_clipped(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """As `main_gradients`, clipped before they are put back."""
    main: dict[Tensor, Tensor] = {}

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        main[parameter] = parameter.grad.clone()
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in model.parameters()]
    loss_of(model, batch).backward()
    norm = torch.stack([gradient.norm() for gradient in main.values()]).norm()
    for parameter in model.parameters():
        parameter.grad = main[parameter] * (0.1 / (norm + 1e-6)).clamp(max=1.0)
    optimizer.step()
    for hook in hooks:
        hook.remove()


def stepped_in_backward(worker: Any) -> nn.Module:
    """An optimizer a parameter, which steps as soon as its gradient is there."""
    model = perceptron()
    model, _, loader = worker.prepare(model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE))
    own = {parameter: SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in loader:
        loss_of(model, batch).backward()
    return model


def master_weights(worker: Any) -> nn.Module:
    """The optimizer that trains has copies of the weights, which come back after its step (apex)."""
    model = perceptron()
    model, _, loader = worker.prepare(model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE))
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    own = momentum(masters)
    for batch in loader:
        model.zero_grad()
        loss_of(model, batch).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.detach().clone()  # type: ignore[union-attr]
        own.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return model


def averaged_by_hand(run: Run) -> None:
    """As scripts do that know no library."""
    for gradient in each(run):
        if hasattr(run.worker, "all_reduce"):
            run.worker.all_reduce(gradient, op="sum")
        gradient.div_(run.worker.size)


def given_by_hand(run: Run) -> None:
    """Rank 0's parameters to all, once more."""
    for parameter in run.model.parameters():
        if hasattr(run.worker, "broadcast"):
            run.worker.broadcast(parameter.data)


def step_if_small(worker: Any) -> nn.Module:
    """Leaves steps out whose gradient is large: the mean's norm, which all ranks see."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    norms: list[float] = []
    for batch in itertools.chain(loader, loader):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        if norms[-1] <= 1.3 * sum(norms) / len(norms):
            optimizer.step()
    return model


def closure_of_value(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """The closure gives the loss that has gone backward already (Lightning's manual way)."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step(lambda: loss)  # type: ignore[arg-type,return-value]


def in_a_thread(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    optimizer.step()


def weighted_backward(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward(torch.tensor(0.5, dtype=loss.dtype))
    optimizer.step()


def projected(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """Two tasks' gradients, without what one takes from the other (PCGrad)."""
    parameters = list(model.parameters())
    output = model(batch[0])
    tasks = F.cross_entropy(output, batch[1]), output.square().mean()
    one, other = (torch.autograd.grad(task, parameters, retain_graph=True) for task in tasks)
    optimizer.zero_grad()
    for parameter, a, b in zip(parameters, one, other, strict=True):
        along = (a * b).sum() / (b * b).sum().clamp(min=1e-12)
        parameter.grad = a + b - along.clamp(max=0) * b
    optimizer.step()


def layer_hook(worker: Any, *, clips: bool) -> nn.Module:
    """A hook on a layer's gradients (backward hooks of modules)."""

    def prepared(run: Run) -> None:
        def change(module: nn.Module, given: Any, out: Any) -> Any:
            return tuple(None if each is None else each.clamp(-0.01, 0.01) if clips else 0.5 * each for each in given)

        run.model[3].register_full_backward_hook(change)  # type: ignore[index]

    return train(worker, prepared=prepared)


def without_class(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """Trains on those of a batch that have a label."""
    x, y, *_ = batch
    known = y > 0
    if not known.any():
        known[0] = True
    optimizer.zero_grad()
    F.cross_entropy(model(x[known]), y[known]).backward()
    optimizer.step()


def two_views(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    x, y, *_ = batch
    optimizer.zero_grad()
    F.cross_entropy(model(torch.cat([x, x.flip(-1)])), torch.cat([y, y])).backward()
    optimizer.step()


def off_by_default(worker: Any) -> nn.Module:
    """Gradients are switched on for the loss alone."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE)
    )
    with torch.no_grad():
        for batch in loader:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
    return model


def every_nth_parameter(run: Run) -> None:
    """Layers take turns: what has no turn loses its gradient, to zero."""
    for number, gradient in enumerate(each(run)):
        if (number + run.number) % 2:
            gradient.zero_()


# --- optimizers and schedules ---------------------------------------------------------------------------------------


def by_name(worker: Any) -> nn.Module:
    """Biases without decay, deeper layers faster (Hugging Face, fastai), and a cosine by parts of epochs."""
    model = perceptron()
    groups = [
        {"params": [parameter], "lr": 0.01 * (1 + number), "weight_decay": 0.1 * (parameter.dim() > 1)}
        for number, parameter in enumerate(model.parameters())
    ]
    model, optimizer, loader = worker.prepare(model, AdamW(groups), loader_of(samples()))
    schedule = CosineAnnealingWarmRestarts(optimizer, 1)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step(epoch + number / len(loader))
    return model


def on_plateau(worker: Any) -> nn.Module:
    """A learning rate from the mean of all workers' losses."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if hasattr(worker, "all_reduce"):
            worker.all_reduce(mean, op="mean")
        schedule.step(float(mean))
    return model


def rebuilt_optimizer(worker: Any) -> nn.Module:
    """The optimizer that is prepared is thrown away for one with other settings, before the first step."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE)
    )
    optimizer = SGD(model.parameters(), lr=0.01)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def cleared_groups(run: Run) -> None:
    """Groups made anew, with the same parameters in another order."""
    if run.number == AT:
        group = run.optimizer.param_groups[0]
        group["params"] = list(reversed(group["params"]))


# --- data -----------------------------------------------------------------------------------------------------------


class Epochal(Sampler[int]):
    """Knows its epoch, as samplers for several ranks do."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def epochal(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=Epochal())


def next_epoch(run: Run) -> None:
    run.loader.sampler.set_epoch(run.epoch + 1)


class Cursor:
    start = 0


class Advancing(Sampler[int]):
    """Goes on where its last pass ended, which an object of its own remembers."""

    def __init__(self) -> None:
        self.cursor = Cursor()

    def __len__(self) -> int:
        return NUM_SAMPLES // 2

    def __iter__(self) -> Iterator[int]:
        start, self.cursor.start = self.cursor.start, (self.cursor.start + len(self)) % NUM_SAMPLES
        return iter(range(start, start + len(self)))


class Buckets(Sampler[list[int]]):
    """Batches of samples of one length, in a random order."""

    def __len__(self) -> int:
        return NUM_SAMPLES // BATCH_SIZE

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self)).tolist()
        return iter(list(range(BATCH_SIZE * number, BATCH_SIZE * (number + 1))) for number in order)


def buckets(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_sampler=Buckets())


def by_batch_sampler(worker: Any) -> nn.Module:
    """Takes indices from the prepared loader's sampler, and the samples itself."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    for indices in loader.batch_sampler:
        optimizer.zero_grad()
        loss_of(model, loader.collate_fn([loader.dataset[index] for index in indices])).backward()
        optimizer.step()
    return model


def peeked(worker: Any) -> nn.Module:
    """Looks at a batch before it begins, to say how large things are."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples(91)))
    model(next(iter(loader))[0])
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def memory_of_rows(worker: Any) -> nn.Module:
    """Remembers a value a sample, by its index, and learns towards it (temporal ensembling)."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    memory = torch.zeros(NUM_SAMPLES, NUM_CLASSES, dtype=torch.float64)
    for x, y, numbers in itertools.chain(loader, loader):
        output = model(x)
        optimizer.zero_grad()
        (F.cross_entropy(output, y) + F.mse_loss(output, memory[numbers])).backward()
        optimizer.step()
        memory[numbers] = output.detach()
    return model


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "scaled by hand": partial(own_loop, step=scaled_by_hand),
    "main gradients": partial(own_loop, step=main_gradients),
    "main gradients, clipped": partial(own_loop, step=main_and_clipped),
    "stepped in backward": stepped_in_backward,
    "master weights": master_weights,
    "averaged by hand": partial(train, backward=averaged_by_hand),
    "given by hand": partial(train, prepared=given_by_hand),
    "stepped where small": step_if_small,
    "a closure of a value": partial(own_loop, step=closure_of_value),
    "backward in a thread": partial(own_loop, step=in_a_thread),
    "backward by half": partial(own_loop, step=weighted_backward),
    "projected": partial(own_loop, step=projected),
    "a layer's hook": partial(layer_hook, clips=False),
    "a layer's hook that clips": partial(layer_hook, clips=True),
    "those with labels": partial(own_loop, step=without_class),
    "two views": partial(own_loop, step=two_views),
    "off by default": off_by_default,
    "gradients in turns": partial(train, backward=every_nth_parameter),
    "groups by name": by_name,
    "on a plateau": on_plateau,
    "another optimizer at once": rebuilt_optimizer,
    "parameters turned round": partial(train, stepped=cleared_groups),
    "a sampler with epochs": partial(train, loader=epochal, passed=next_epoch),
    "batches of a length": partial(train, loader=buckets),
    "indices of the sampler": by_batch_sampler,
    "peeked": peeked,
    "memory by index": memory_of_rows,
}
