"""What scripts do with weights beside training: keep them, load them, leave them out, change them in evaluations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

from tests.conformance.odd_hunted import Run, train
from tests.conformance.scripts import BATCH_SIZE, NUM_CLASSES, momentum, samples

LIMIT = 0.05


def keep(run: Run, *, of: Callable[[nn.Parameter], Tensor]) -> None:
    """Takes tensors of the parameters' memory before `prepare`."""
    run.kept = [of(parameter) for parameter in run.model.parameters()]  # type: ignore[attr-defined]


def clamp_kept(run: Run) -> None:
    for kept in run.kept:  # type: ignore[attr-defined]
        kept.clamp_(-LIMIT, LIMIT)


def follow_kept(run: Run) -> None:
    """A learning rate by the norms that kept tensors show."""
    norm = sum(float(kept.norm()) for kept in run.kept)  # type: ignore[attr-defined]
    run.optimizer.param_groups[0]["lr"] = 0.05 / (1 + norm)


def in_a_vector(run: Run) -> None:
    """All parameters lie in one vector that the script keeps."""
    parameters = list(run.model.parameters())
    run.kept = [torch.cat([each.detach().flatten() for each in parameters])]  # type: ignore[attr-defined]
    pieces = run.kept[0].split([each.numel() for each in parameters])  # type: ignore[attr-defined]
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data = piece.view_as(parameter)


def load_others(run: Run) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def load_own(run: Run) -> None:
    """On one rank alone."""
    if run.worker.rank:
        load_others(run)


class Headed(nn.Module):
    """Says that its head is all there is to train."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.flatten, self.back = nn.Flatten(), nn.Linear(64, 8).double()
        self.head = nn.Linear(8, NUM_CLASSES).double()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters()

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.back(self.flatten(x))))


def left_out(worker: Any, *, trains_all: bool) -> nn.Module:
    """Each rank has drawn other weights; rank 0's are to be everybody's."""
    model = Headed(worker.rank)
    parameters = nn.Module.parameters(model) if trains_all else model.parameters()
    model, optimizer, loader = worker.prepare(
        model, momentum(parameters), DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True)
    )
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def evaluated(worker: Any, *, evaluate: Callable[[nn.Module], object]) -> nn.Module:
    def prepared(run: Run) -> None:
        @worker.evaluation
        def look(model: nn.Module) -> dict[str, float]:
            evaluate(model)
            return {"norm": float(next(model.parameters()).norm())}

    return train(worker, prepared=prepared)


def round_weights(model: nn.Module) -> None:
    """As those do who ask what a quantised model would find."""
    for parameter in model.parameters():
        parameter.copy_((parameter * 4).round() / 4)


def take_others(model: nn.Module) -> None:
    """Other tensors in the parameters' places, and what is there, frozen."""
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)


def swap_layer(model: nn.Module) -> None:
    model[1].weight = nn.Parameter(torch.zeros(16, 64, dtype=torch.float64))  # type: ignore[index]


def normalised(worker: Any, *, num_epochs: int = 5) -> nn.Module:
    """Averages weights, and then finds the average's statistics with a pass over the loader."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))
    model, optimizer, loader = worker.prepare(
        model.double(), momentum(model.parameters()), DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True)
    )
    average = AveragedModel(model)
    for _ in range(num_epochs):
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)
    update_bn(((x,) for x, *_ in loader), average)
    model.load_state_dict(copy.deepcopy(average.module.state_dict()))
    return model


def data_of(parameter: nn.Parameter) -> Tensor:
    return parameter.data


def row_of(parameter: nn.Parameter) -> Tensor:
    """A part of it that is not its beginning."""
    return parameter.detach()[1:]


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "kept and clamped": partial(train, before=partial(keep, of=data_of), stepped=clamp_kept),
    "a part kept and clamped": partial(train, before=partial(keep, of=row_of), stepped=clamp_kept),
    "kept and read": partial(train, before=partial(keep, of=data_of), backward=follow_kept),
    "in a vector from before": partial(train, before=in_a_vector, stepped=clamp_kept),
    "others loaded": partial(train, prepared=load_others),
    "parameters left out": partial(left_out, trains_all=True),
    "parameters left out, frozen": partial(left_out, trains_all=False),
    "rounded in evaluations": partial(evaluated, evaluate=round_weights),
    "others in evaluations": partial(evaluated, evaluate=take_others),
    "a layer swapped in evaluations": partial(evaluated, evaluate=swap_layer),
}
