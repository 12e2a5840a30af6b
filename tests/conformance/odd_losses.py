"""What scripts make their losses of: sums in loops, norms of gradients, outputs of all workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.conformance.odd_habits import each, own_loop
from tests.conformance.odd_hunted import Run
from tests.conformance.scripts import BATCH_SIZE, loader_of, momentum, perceptron, samples


def looped(model: nn.Module, optimizer: Optimizer, batch: Any, *, is_mean: bool, is_cut: bool) -> None:
    """A term a sample: computed by itself, or cut out of the batch's outputs."""
    x, y, *_ = batch
    optimizer.zero_grad()
    outputs = list(model(x)) if is_cut else [model(x[i : i + 1])[0] for i in range(len(x))]
    loss = torch.zeros((), dtype=x.dtype)
    for output, label in zip(outputs, y, strict=True):
        loss = loss + F.cross_entropy(output, label)
    (loss / len(x) if is_mean else loss).backward()
    optimizer.step()


def in_parts(model: nn.Module, optimizer: Optimizer, batch: Any, *, divides: bool) -> None:
    """A backward pass a sample."""
    x, y, *_ = batch
    optimizer.zero_grad()
    for one, label in zip(x.split(1), y.split(1), strict=True):
        loss = F.cross_entropy(model(one), label)
        (loss / len(x) if divides else loss).backward()
    optimizer.step()


def several_losses(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """As many means as the batch has samples."""
    x, y, *_ = batch
    optimizer.zero_grad()
    output = model(x)
    losses = [F.cross_entropy(scale * output, y) for scale in range(1, 1 + BATCH_SIZE)]
    sum(losses, torch.zeros((), dtype=x.dtype)).backward()
    optimizer.step()


def norm_of(run: Run) -> float:
    return float(torch.cat([gradient.flatten() for gradient in each(run)]).norm())


def weigh_by_norm(worker: Any, *, first: int) -> nn.Module:
    """Divides a loss by the norm of the last gradients, as balancing several losses does."""
    norms = [1.0]

    def backward(run: Run) -> None:
        if run.number >= first:
            norms.append(min(max(norm_of(run), 0.2), 5.0))

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4).double())
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE)
    )
    run = Run(worker, model, optimizer)
    for x, y, _ in loader:
        run.number += 1
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / norms[-1]).backward()
        backward(run)
        optimizer.step()
    return model


def weighed_by_all(worker: Any) -> nn.Module:
    """A mean by what the global batch weighs, as Paceline's warnings say it; batches are not equally large."""
    weight, ignored = torch.arange(1.0, 5.0, dtype=torch.float64), 2
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples(43)))
    for x, labels, _ in loader:
        optimizer.zero_grad()
        summed = F.cross_entropy(model(x), labels, weight, ignore_index=ignored, reduction="sum")
        total, num = weight[labels[labels != ignored]].sum(), len(x)
        if hasattr(worker, "strategy") and worker.strategy.traits.lock_step:
            total, num = worker.all_reduce_tree([total, num], op="sum")
        (summed / total * num / len(x)).backward()
        optimizer.step()
    return model


def masked_mean(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """Over those samples that are of some classes."""
    x, y, *_ = batch
    optimizer.zero_grad()
    mask = (y < 2).to(x.dtype)
    losses = F.cross_entropy(model(x), y, reduction="none")
    ((losses * mask).sum() / mask.sum().clamp(min=1)).backward()
    optimizer.step()


def weighed_by_hand(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """A mean by weights of classes."""
    x, y, *_ = batch
    optimizer.zero_grad()
    weights = torch.arange(1.0, 5.0, dtype=x.dtype)[y]
    ((weights * F.cross_entropy(model(x), y, reduction="none")).sum() / weights.sum()).backward()
    optimizer.step()


def weighed(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """The same by torch."""
    x, y, *_ = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x), y, torch.arange(1.0, 5.0, dtype=x.dtype)).backward()
    optimizer.step()


def step_with(model: nn.Module, optimizer: Optimizer, batch: Any, *, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Takes a step of a loss of outputs and labels."""
    optimizer.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def sums_added(output: Tensor, y: Tensor) -> Tensor:
    return output.abs().mean(1).sum() + F.cross_entropy(output, y, reduction="none").sum(dim=0)


def divided_before(output: Tensor, y: Tensor) -> Tensor:
    """Means in other words; there are as many classes as samples."""
    return (F.cross_entropy(output, y, reduction="none") / len(y)).sum() + output.square().mean(0).sum()


def added_by_python(output: Tensor, y: Tensor) -> Tensor:
    return torch.as_tensor(sum(F.cross_entropy(output, y, reduction="none")))


def each_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def added_by_einsum(output: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("i,i->", each_loss(output, y), torch.ones(len(y), dtype=output.dtype))


def weights_of_one(output: Tensor, y: Tensor) -> Tensor:
    """A mean in other words."""
    return (each_loss(output, y) * torch.full((len(y),), 1 / len(y), dtype=output.dtype)).sum()


def halved(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * each_loss(output, y).sum()


def of_largest(output: Tensor, y: Tensor) -> Tensor:
    return each_loss(output, y).topk(2).values.mean()


def times_own(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y) * (1 + y.double().mean())


def overlap(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Whose quotient is Dice's coefficient."""
    found, wanted = output.softmax(1), F.one_hot(y, output.shape[1])
    return 2 * (found * wanted).sum(), (found + wanted).sum()


def quotient(output: Tensor, y: Tensor) -> Tensor:
    above, below = overlap(output, y)
    return 1 - above / below


def quotient_of_all(worker: Any) -> nn.Module:
    """The same of the global batch, as docs/script.md shows it."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    for x, y, _ in loader:
        optimizer.zero_grad()
        above, below = overlap(model(x), y)
        loss = 1 - above / below
        if hasattr(worker, "strategy") and worker.strategy.traits.lock_step:
            all_above, all_below = worker.all_reduce_tree([above.detach(), below.detach()], op="sum")
            loss = -worker.size * (above / all_below - below * all_above / all_below**2)
        loss.backward()
        optimizer.step()
    return model


def second_summed(worker: Any) -> nn.Module:
    """Two optimizers in turn, the second of which has a sum."""
    one, other = perceptron(), perceptron()
    first, second = momentum(one.parameters()), momentum(other.parameters())
    one, other, first, second, data = worker.prepare(
        one=one, other=other, first=first, second=second, data=loader_of(samples())
    )
    for x, y, *_ in data:
        first.zero_grad()
        F.cross_entropy(one(x), y).backward()
        first.step()
        second.zero_grad()
        each_loss(other(x), y).sum().backward()
        second.step()
    return nn.ModuleDict({"one": one, "other": other})


def of_all(worker: Any, tensor: Tensor) -> Tensor:
    return torch.cat(worker.all_gather(tensor)) if hasattr(worker, "all_gather") else tensor


def contrastive(worker: Any) -> nn.Module:
    """Tells each sample from all others of the global batch."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6).double())
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True)
    )
    for x, *_ in loader:
        one, other = F.normalize(model(x), dim=1), F.normalize(model(0.9 * x + 0.1), dim=1)
        optimizer.zero_grad()
        mine = worker.rank * len(x) + torch.arange(len(x))
        F.cross_entropy(one @ of_all(worker, other).t() / 0.1, mine).backward()
        optimizer.step()
    return model


def two_views_apart(output: Tensor, y: Tensor) -> Tensor:
    """Tells each sample's second view from all others of its batch."""
    num = len(output)
    both = F.normalize(torch.cat([output, output.sin()]), dim=1)
    alike = (both @ both.t() / 0.5).masked_fill(torch.eye(2 * num, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(alike, torch.arange(2 * num).roll(num))


def decorrelated(output: Tensor, y: Tensor) -> Tensor:
    """Features of two views, one by one."""
    found = output[:, :3].t() @ output[:, :3].sin() / len(output)
    return 0.1 * (found - torch.eye(3, dtype=found.dtype)).square().mean() + F.cross_entropy(output, y)


def of_mean_prediction(output: Tensor, y: Tensor) -> Tensor:
    """Three classes are to come as often; of as many as samples nothing is told."""
    mean = output[:, :3].softmax(1).mean(0)
    return F.cross_entropy(output, y) + (mean * mean.log()).sum()


def of_those_at_risk(output: Tensor, y: Tensor) -> Tensor:
    """Of each sample and those that come after it."""
    return (output[:, :1].exp().cumsum(0).log() - output[:, :1]).mean()


def weighed_terms(output: Tensor, y: Tensor, *, is_mean: bool) -> Tensor:
    """A list of losses of single samples, each with a weight of its own."""
    terms = [float(1 + label) * F.cross_entropy(one, label) for one, label in zip(output, y, strict=True)]
    total = torch.stack(terms).sum()
    return total / len(y) if is_mean else total


def actor_and_critic(output: Tensor, y: Tensor) -> Tensor:
    """Two such lists."""
    actors, critics = [], []
    for log, value, gain in zip(output.log_softmax(1)[:, 0], output[:, 1], y.to(output.dtype), strict=True):
        actors.append(-log * (gain - value.item()))
        critics.append(F.smooth_l1_loss(value, gain))
    return torch.stack(actors).sum() + torch.stack(critics).sum()


def means_of_samples(output: Tensor, y: Tensor) -> Tensor:
    """Weighed by classes, of one sample after the other."""
    weight = torch.arange(1.0, 5.0, dtype=output.dtype)
    losses = [F.cross_entropy(output[i : i + 1], y[i : i + 1], weight) for i in range(len(y))]
    return sum(float(1 + label) * loss for loss, label in zip(losses, y, strict=True)) / len(y)  # type: ignore[return-value]


def sums_later(worker: Any, *, at: int) -> nn.Module:
    """Takes means at first, and sums from a step on; twelve are an epoch."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    for number, (x, y, _) in enumerate(itertools.chain(loader, loader, loader), 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="mean" if number < at else "sum").backward()
        optimizer.step()
    return model


def of_worst_group(output: Tensor, y: Tensor) -> Tensor:
    """As group DRO has it."""
    losses = F.cross_entropy(output, y, reduction="none")
    return torch.stack([losses[: len(y) // 2].mean(), losses[len(y) // 2 :].mean()]).max()


def beside_a_mean(output: Tensor, y: Tensor) -> Tensor:
    """As of variational autoencoders."""
    return F.cross_entropy(output, y) - 0.5 * torch.sum(1 + output - output.exp())


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "a sum by a loop over outputs": partial(own_loop, step=partial(looped, is_mean=False, is_cut=True)),
    "a mean by a loop": partial(own_loop, step=partial(looped, is_mean=True, is_cut=False)),
    "a mean in parts": partial(own_loop, step=partial(in_parts, divides=True)),
    "as many losses as samples": partial(own_loop, step=several_losses),
    "weighed by gradients": partial(weigh_by_norm, first=1),
    "others' outputs in the loss": contrastive,
    "sums added": partial(own_loop, step=partial(step_with, loss=sums_added)),
    "divided, then summed": partial(own_loop, step=partial(step_with, loss=divided_before)),
    "a sum by Python": partial(own_loop, step=partial(step_with, loss=added_by_python)),
    "a masked mean": partial(own_loop, step=masked_mean),
    "weighed by hand": partial(own_loop, step=weighed_by_hand),
    "weighed by torch": partial(own_loop, step=weighed),
    "a sum by einsum": partial(own_loop, step=partial(step_with, loss=added_by_einsum)),
    "weights that add up to one": partial(own_loop, step=partial(step_with, loss=weights_of_one)),
    "half a sum": partial(own_loop, step=partial(step_with, loss=halved)),
    "the largest losses": partial(own_loop, step=partial(step_with, loss=of_largest)),
    "a factor of its own": partial(own_loop, step=partial(step_with, loss=times_own)),
    "a sum of the second optimizer's": second_summed,
    "views told apart": partial(own_loop, step=partial(step_with, loss=two_views_apart)),
    "features made apart": partial(own_loop, step=partial(step_with, loss=decorrelated)),
    "the mean prediction": partial(own_loop, step=partial(step_with, loss=of_mean_prediction)),
    "those at risk": partial(own_loop, step=partial(step_with, loss=of_those_at_risk)),
    "weighed terms": partial(own_loop, step=partial(step_with, loss=partial(weighed_terms, is_mean=False))),
    "weighed terms, divided": partial(own_loop, step=partial(step_with, loss=partial(weighed_terms, is_mean=True))),
    "an actor and a critic": partial(own_loop, step=partial(step_with, loss=actor_and_critic)),
    "means of samples": partial(own_loop, step=partial(step_with, loss=means_of_samples)),
    "sums from the second epoch on": partial(sums_later, at=13),
    "sums in mid-epoch": partial(sums_later, at=18),
    "half a sum beside a mean": partial(own_loop, step=partial(step_with, loss=beside_a_mean)),
    "the worst group": partial(own_loop, step=partial(step_with, loss=of_worst_group)),
    "a quotient of sums": partial(own_loop, step=partial(step_with, loss=quotient)),
}
