"""What recipes of the field do around the usual loop: found by a second hunt, and kept."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

from tests.conformance.odd_habits import own_loop
from tests.conformance.odd_hunted import AT, NUM_EPOCHS, Run, train
from tests.conformance.scripts import BATCH_SIZE, NUM_CLASSES, loader_of, momentum, perceptron, samples


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# --- models ---------------------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """Batch norm that stays as it was trained elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 8).double(), nn.BatchNorm1d(8).double()
        self.last = nn.Linear(8, NUM_CLASSES).double()
        self.norm.eval()

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.norm(self.first(x.flatten(1)))))


class Heads(nn.Module):
    """Two tasks, of which each batch has one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, 8).double()
        self.heads = nn.ModuleList(nn.Linear(8, NUM_CLASSES).double() for _ in range(2))
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.heads[self.count % 2](torch.tanh(self.trunk(x.flatten(1))))


def in_data_parallel() -> nn.Module:
    return nn.DataParallel(perceptron())


def shared() -> nn.Module:
    return perceptron().share_memory()


def share(run: Run) -> None:
    run.model.share_memory()


def through_vector(run: Run) -> None:
    """Weights become slices of a vector, as evolution strategies have them."""
    if run.number == AT:
        vector = nn.utils.parameters_to_vector(run.model.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, run.model.parameters())


def mean_teacher(worker: Any) -> nn.Module:
    """Learns also from an average of its own weights, which is no part of what is prepared."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    teacher = copy.deepcopy(model).requires_grad_(False)
    for batch in itertools.chain(loader, loader):
        optimizer.zero_grad()
        (loss_of(model, batch) + F.mse_loss(model(batch[0]), teacher(batch[0]))).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    return model


def weight_averaging(worker: Any) -> nn.Module:
    """SWA as torch documents it, with a pass over the loader for batch norm in the end."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    mean, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=1)
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        mean.update_parameters(model)
        schedule.step()
    update_bn(loader, mean)
    return model


# --- optimizers -----------------------------------------------------------------------------------------------------


def find_rate(run: Run) -> None:
    """Tries learning rates for some steps, and puts all back (before prepare)."""
    kept = copy.deepcopy(run.model.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    for number, batch in enumerate(itertools.islice(DataLoader(samples(), batch_size=BATCH_SIZE), 5)):
        run.optimizer.param_groups[0]["lr"] = 1e-4 * 4**number
        run.optimizer.zero_grad()
        loss_of(run.model, batch).backward()
        run.optimizer.step()
    run.model.load_state_dict(kept[0])
    run.optimizer.load_state_dict(kept[1])


def find_rate_inside(worker: Any) -> nn.Module:
    """As `find_rate`, after prepare and with the prepared loader."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for number, batch in enumerate(itertools.islice(iter(loader), 5)):
        optimizer.param_groups[0]["lr"] = 1e-4 * 4**number
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def decay_by_hand(run: Run, *, first: int) -> None:
    if run.number >= first:
        for parameter in run.model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.1)  # type: ignore[union-attr]


def clip_by_own_loss(run: Run) -> None:
    """Once, on the rank whose loss was large."""
    if run.number == AT and run.worker.rank:
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


def centralise(run: Run) -> None:
    for parameter in run.model.parameters():
        if parameter.dim() > 1:
            parameter.grad -= parameter.grad.mean(1, keepdim=True)  # type: ignore[union-attr,operator]


def noise_by_step(run: Run) -> None:
    """Annealed noise, alike on all ranks."""
    generator = torch.Generator().manual_seed(run.number)
    for parameter in run.model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad.add_(noise, alpha=0.01)  # type: ignore[union-attr]


# --- steps ----------------------------------------------------------------------------------------------------------


def preallocated(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loss_of(model, batch).backward()
    optimizer.step()


def detached_and_zeroed(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()
    loss_of(model, batch).backward()
    optimizer.step()


def zeroed_after(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)


def head_alone(model: Any, optimizer: Optimizer, batch: Any) -> None:
    """Backward to the last layer only."""
    optimizer.zero_grad()
    loss_of(model, batch).backward(inputs=list(model[3].parameters()))
    optimizer.step()


def weights_perturbed(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """The gradient where each worker's own leads uphill (Wu et al., 2020); weights are as before at the step."""
    optimizer.zero_grad()
    gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.add_(gradient, alpha=0.01)
    loss_of(model, batch).backward()
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.copy_(before)
    optimizer.step()


def inner_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """The loss after a step of its own, sample by sample (MAML)."""
    optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    losses = []
    for x, y in zip(batch[0].split(1), batch[1].split(1), strict=True):
        gradients = torch.autograd.grad(loss_of(model, (x, y)), list(model.parameters()), create_graph=True)
        values = [p - 0.1 * g for p, g in zip(model.parameters(), gradients, strict=True)]
        found = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        losses.append(F.cross_entropy(found, y))
    torch.stack(losses).mean().backward()
    optimizer.step()


def smoothness_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """A loss and a penalty of the gradient by the input, in passes of their own."""
    optimizer.zero_grad()
    x = batch[0].clone().requires_grad_()
    output = model(x)
    F.cross_entropy(output, batch[1]).backward(retain_graph=True)
    (by_input,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    by_input.square().sum((1, 2, 3)).mean().backward()
    optimizer.step()


def saved_on_host(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """What backward needs goes elsewhere and comes back."""
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def looks_without_gradients(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    with torch.inference_mode():
        model.eval()
        model(batch[0])
        model.train()
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "batch norm frozen": partial(train, model=Normalised),
    "heads in turns": partial(train, model=Heads),
    "in DataParallel": partial(train, model=in_data_parallel),
    "shared before": partial(train, model=shared),
    "shared after": partial(train, prepared=share),
    "through a vector": partial(train, stepped=through_vector),
    "mean teacher": mean_teacher,
    "weight averaging": weight_averaging,
    "rate found before": partial(train, before=find_rate),
    "rate found inside": find_rate_inside,
    "decayed by hand": partial(train, backward=partial(decay_by_hand, first=1)),
    "decayed by hand, later": partial(train, backward=partial(decay_by_hand, first=AT)),
    "clipped by own loss": partial(train, backward=clip_by_own_loss),
    "centralised": partial(train, backward=centralise),
    "noise by step": partial(train, backward=noise_by_step),
    "maximised": partial(train, optimizer=partial(SGD, lr=0.01, maximize=True)),
    "fused": partial(train, optimizer=partial(Adam, lr=0.01, fused=True)),
    "gradients preallocated": partial(own_loop, step=preallocated),
    "gradients detached and zeroed": partial(own_loop, step=detached_and_zeroed),
    "gradients zeroed after": partial(own_loop, step=zeroed_after),
    "head alone": partial(own_loop, step=head_alone),
    "weights perturbed": partial(own_loop, step=weights_perturbed),
    "an inner step": partial(own_loop, step=inner_step),
    "smoothness": partial(own_loop, step=smoothness_step),
    "saved on the host": partial(own_loop, step=saved_on_host),
    "inference between": partial(own_loop, step=looks_without_gradients),
}
