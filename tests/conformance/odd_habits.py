"""Habits of training scripts that no table listed: averages of weights, hooks, own gradients, data that differ."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, NAdam, Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
    random_split,
)

from tests.conformance.odd_hunted import AT, Change, Run, train
from tests.conformance.scripts import BATCH_SIZE, NUM_CLASSES, momentum, perceptron, plain_step, samples

LIMIT = 0.01


def each(run: Run) -> list[Tensor]:
    """The gradients."""
    return [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]


# --- averages of weights --------------------------------------------------------------------------------------------


def averaging(worker: Any, *, end: Callable[[nn.Module, AveragedModel], object]) -> nn.Module:
    """Stochastic weight averaging with its own schedule, and what is done with the average after the loop."""
    kept: dict[str, Any] = {}

    def prepared(run: Run) -> None:
        kept.update(model=run.model, mean=AveragedModel(run.model), schedule=SWALR(run.optimizer, swa_lr=0.01))

    def passed(run: Run) -> None:
        kept["mean"].update_parameters(run.model)
        kept["schedule"].step()

    model = train(worker, prepared=prepared, passed=passed)
    end(model, kept["mean"])
    return model


def keep_apart(model: nn.Module, mean: AveragedModel) -> None:
    pass


def take_average(model: nn.Module, mean: AveragedModel) -> None:
    model.load_state_dict(mean.module.state_dict())


def swap_average(run: Run) -> None:
    """Looks at a moving average of the weights in the model's place, loaded and put back."""
    if run.number == AT:
        run.mean = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[attr-defined]
        own = copy.deepcopy(run.model.state_dict())
        run.model.load_state_dict(run.mean.module.state_dict())  # type: ignore[attr-defined]
        run.model.load_state_dict(own)


def restore_best(worker: Any) -> nn.Module:
    best: dict[str, Any] = {}

    def passed(run: Run) -> None:
        best.update(best or copy.deepcopy(run.model.state_dict()))

    model = train(worker, passed=passed)
    model.load_state_dict(best)
    return model


# --- gradients ------------------------------------------------------------------------------------------------------


def add_hooks(run: Run, *, hook: Callable[[Tensor], Any], after: bool = False, at: int = 0) -> None:
    if run.number == at:
        for parameter in run.model.parameters():
            (parameter.register_post_accumulate_grad_hook if after else parameter.register_hook)(hook)


def clip(gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def clip_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-LIMIT, LIMIT)


def mask(gradient: Tensor) -> Tensor:
    """As by those who train some rows of an embedding alone."""
    return gradient * (torch.arange(len(gradient)) % 3 > 0).view(-1, *[1] * (gradient.dim() - 1))


def normalise(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-12)


def clip_out_of_place(run: Run) -> None:
    for parameter in run.model.parameters():
        assert parameter.grad is not None
        parameter.grad = clip(parameter.grad)


def add_noise(run: Run) -> None:
    for gradient in each(run):
        gradient.add_(torch.randn_like(gradient), alpha=1e-3)


def scale_by_own_loss(run: Run) -> None:
    size = float(each(run)[0].norm()) if run.worker.size == 1 else 1.0 + run.worker.rank
    for gradient in each(run):
        gradient.mul_(1 / (1 + size))


def own_loop(worker: Any, *, step: Callable[[nn.Module, Optimizer, Any], object]) -> nn.Module:
    model = perceptron()
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE)
    )
    for batch in loader:
        step(model, optimizer, batch)
    return model


def gradients_in_parts(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """Layer by layer, in two backward passes."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward(inputs=list(model[1].parameters()), retain_graph=True)  # type: ignore[index]
    (2 * loss).backward(inputs=list(model[3].parameters()))  # type: ignore[index]
    optimizer.step()


def set_one_layer(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """After backward() of the others."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    last = list(model[3].parameters())  # type: ignore[index]
    own = torch.autograd.grad(loss, last, retain_graph=True)
    loss.backward(inputs=list(model[1].parameters()))  # type: ignore[index]
    for parameter, gradient in zip(last, own, strict=True):
        parameter.grad = gradient
    optimizer.step()


def adversarial(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """The fast gradient sign method: two backward passes, the first for the input."""
    x = batch[0].clone().requires_grad_()
    F.cross_entropy(model(x), batch[1]).backward()
    worse = (x + 0.1 * x.grad.sign()).detach()
    optimizer.zero_grad()
    F.cross_entropy(model(worse), batch[1]).backward()
    optimizer.step()


def ones_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """A sum by another name."""
    optimizer.zero_grad()
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    losses.backward(torch.ones_like(losses))
    optimizer.step()


# --- models and optimizers ------------------------------------------------------------------------------------------


def convert(run: Run, *, at: int) -> None:
    if run.number == at:
        run.model.to(torch.float32)
        run.model.register_forward_pre_hook(lambda _, given: (given[0].float(),))


def regroup(run: Run) -> None:
    """A bias gets a rate of its own."""
    if run.number == AT:
        group = run.optimizer.param_groups[0]
        run.optimizer.add_param_group({**group, "params": [group["params"].pop()], "lr": 0.001})


def follow_own_loss(run: Run) -> None:
    """For the step alone: before and after it, all ranks have the same."""
    run.optimizer.param_groups[0]["lr"] = 0.05 / (1 + float(each(run)[0].norm()) + run.worker.rank)


def set_back(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.05


def replace_head(run: Run) -> None:
    if run.number == AT:
        run.model[3] = nn.Linear(16, NUM_CLASSES).double()  # type: ignore[operator]


def forget_momentum(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["momentum_buffer"].zero_()


def train_by_hand(worker: Any) -> nn.Module:
    """The optimizer has the last layer alone, and the script steps the first itself."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(
        model, momentum(model[3].parameters()), DataLoader(samples(), batch_size=BATCH_SIZE)
    )
    for x, y, _ in loader:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model[1].parameters():
                parameter -= 0.05 * parameter.grad
    return model


class Lookahead(Optimizer):
    """Around another optimizer."""

    def __init__(self, params: Any) -> None:
        self.inside, self.count = momentum(params), 0
        super().__init__(self.inside.param_groups, self.inside.defaults)
        self.param_groups = self.inside.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step()
        self.count += 1
        if self.count % 3 == 0:
            for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(fast.detach(), 0.5)
                fast.data.copy_(slow)


class Stateful(nn.Module):
    """Carries its hidden state from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(64, 8).double(), nn.Linear(8, NUM_CLASSES).double()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        hidden = self.cell(x.flatten(1), self.hidden)
        self.hidden = hidden.detach()
        return self.head(hidden)


# --- data -----------------------------------------------------------------------------------------------------------


class Listed(Dataset[Any]):
    """Samples in a list."""

    def __init__(self) -> None:
        self.items = list(samples())

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Shard(Listed):
    """What one rank has, as scripts divide data themselves."""

    def __init__(self, rank: int, size: int) -> None:
        self.items = list(samples())[rank::size]


def listed(worker: Any) -> DataLoader[Any]:
    return DataLoader(Listed(), batch_size=BATCH_SIZE)


def own_shard(worker: Any) -> DataLoader[Any]:
    return DataLoader(Shard(worker.rank, worker.size), batch_size=BATCH_SIZE)


def shuffle_in_place(run: Run, *, seed: int | None) -> None:
    """With the global generator, which is each rank's own, or with one of its own seed."""
    (random if seed is None else random.Random(seed)).shuffle(run.loader.dataset.items)


def weighted(worker: Any) -> DataLoader[Any]:
    weights = torch.linspace(0.1, 1.0, len(samples())).tolist()
    return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=WeightedRandomSampler(weights, len(weights)))


def split(worker: Any) -> DataLoader[Any]:
    return DataLoader(random_split(samples(), [64, 32])[0], batch_size=BATCH_SIZE, shuffle=True)


def nothing_of_some(items: list[Any]) -> Any:
    """Of a batch with a bad sample, nothing."""
    return None if any(int(item[2]) % 13 == 0 for item in items) else torch.utils.data.default_collate(items)


def without_nothing(worker: Any) -> nn.Module:
    loader: Any = lambda worker: DataLoader(samples(), batch_size=BATCH_SIZE, collate_fn=nothing_of_some)  # noqa: E731
    return train(worker, loader=loader, way=lambda batches: (batch for batch in batches if batch is not None))


def more_samples() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE, num_workers=0)


def beside(batches: Any, *, more: Callable[[], DataLoader[Any]]) -> Any:
    """Batches of both loaders, put together."""
    return ([torch.cat(parts) for parts in zip(*pair, strict=True)] for pair in zip(batches, more(), strict=False))


def shared_out(worker: Any) -> DataLoader[Any]:
    """Each rank's own part, as the script has divided it."""
    sampler: DistributedSampler[Any] = DistributedSampler(samples(), worker.size, worker.rank)
    return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=sampler)


def all_for_each(worker: Any) -> DataLoader[Any]:
    found = more_samples()
    found.dataset.differs_by_rank = True  # type: ignore[attr-defined]
    return found


def validate(run: Run) -> None:
    """On all of another loader, after every step."""
    for x, y, *_ in more_samples():
        F.cross_entropy(run.model(x), y)


def twice_a_batch(worker: Any) -> nn.Module:
    """Two steps with each pair of batches."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE)
    )
    for x, y, *_ in beside(loader, more=more_samples):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


class Inner(IterableDataset[Any]):
    """A stream that reads a loader of its own."""

    def __iter__(self) -> Any:
        for batch in DataLoader(samples(), batch_size=2 * BATCH_SIZE):
            yield from zip(*batch, strict=True)


def with_inner(worker: Any) -> DataLoader[Any]:
    return DataLoader(Inner(), batch_size=BATCH_SIZE)


def one_at_a_time(worker: Any) -> nn.Module:
    """A new pass for each batch."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True)
    )
    for _ in range(20):
        plain_step(model, optimizer, next(iter(loader)))
    return model


before_clip: Change = partial(add_hooks, hook=clip)
SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "averaged weights, kept apart": partial(averaging, end=keep_apart),
    "averaged weights, in the end": partial(averaging, end=take_average),
    "averaged weights, swapped in": partial(train, stepped=swap_average),
    "best weights, in the end": restore_best,
    "clipped in a hook": partial(train, prepared=before_clip),
    "clipped in a hook, before": partial(train, before=before_clip),
    "clipped in a hook, later": partial(train, stepped=partial(add_hooks, hook=clip, at=AT)),
    "clipped in a hook after": partial(train, prepared=partial(add_hooks, hook=clip_in_place, after=True)),
    "normalised in a hook": partial(train, prepared=partial(add_hooks, hook=normalise)),
    "masked in a hook": partial(train, prepared=partial(add_hooks, hook=mask)),
    "finite in a hook": partial(train, prepared=partial(add_hooks, hook=torch.nan_to_num)),
    "clipped out of place": partial(train, backward=clip_out_of_place),
    "noise on gradients": partial(train, backward=add_noise),
    "gradients by own loss": partial(train, backward=scale_by_own_loss),
    "gradients in parts": partial(own_loop, step=gradients_in_parts),
    "one layer's gradients set": partial(own_loop, step=set_one_layer),
    "adversarial": partial(own_loop, step=adversarial),
    "a sum by ones": partial(own_loop, step=ones_step),
    "converted in the loop": partial(train, stepped=partial(convert, at=AT)),
    "converted after prepare": partial(train, prepared=partial(convert, at=0)),
    "a new head": partial(train, stepped=replace_head),
    "a group of its own": partial(train, stepped=regroup),
    "a rate by own loss": partial(train, backward=follow_own_loss, stepped=set_back),
    "momentum forgotten": partial(train, passed=forget_momentum),
    "trained by hand": train_by_hand,
    "lookahead": partial(train, optimizer=Lookahead),
    "nadam": partial(train, optimizer=NAdam),
    "adam, one by one": partial(train, optimizer=partial(Adam, foreach=False, amsgrad=True)),
    "fused momentum": partial(train, optimizer=partial(SGD, lr=0.05, momentum=0.9, fused=True)),
    "hidden state": partial(train, model=Stateful),
    "a shard of its own": partial(train, loader=own_shard),
    "shuffled in place": partial(train, loader=listed, prepared=partial(shuffle_in_place, seed=None)),
    "shuffled in place, later": partial(train, loader=listed, passed=partial(shuffle_in_place, seed=None)),
    "shuffled in place alike": partial(train, loader=listed, passed=partial(shuffle_in_place, seed=1)),
    "weighted": partial(train, loader=weighted),
    "split": partial(train, loader=split),
    "nothing of some batches": without_nothing,
    "one batch a pass": one_at_a_time,
    "another loader beside": partial(train, way=partial(beside, more=more_samples)),
    "another loader beside, two steps a batch": twice_a_batch,
    "another loader after every step": partial(train, stepped=validate),
    "a loader in the data": partial(train, loader=with_inner),
}
