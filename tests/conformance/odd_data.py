"""What recipes of the field do with their data, and what their ranks decide alone: found by a second hunt, and kept."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from tests.conformance.odd_hunted import AT, Run, cached, train
from tests.conformance.odd_recipes import loss_of
from tests.conformance.scripts import BATCH_SIZE, NUM_CLASSES, NUM_SAMPLES, loader_of, momentum, perceptron, samples


class Drawn(Dataset[Any]):
    """Augments with random numbers of Python, numpy and torch."""

    def __init__(self) -> None:
        self.all = samples()

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> Any:
        x, y, number = self.all[index]
        return x * (1 + 0.1 * random.random()) + 0.1 * np.random.rand() + 0.1 * torch.rand(()), y, number


def augmented(worker: Any) -> DataLoader[Any]:
    return DataLoader(Drawn(), batch_size=BATCH_SIZE, shuffle=True)


class Permuted(Sampler[int]):
    """Draws with numpy's or Python's own generators."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(NUM_SAMPLES))
        if self.kind == "numpy":
            return iter(np.random.permutation(NUM_SAMPLES).tolist())
        random.shuffle(numbers)
        return iter(numbers)


def permuted(worker: Any, *, kind: str) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=Permuted(kind))


class Curriculum(Sampler[int]):
    """Easy samples first: more of them from epoch to epoch."""

    def __init__(self) -> None:
        self.share = 0.5

    def __len__(self) -> int:
        return int(self.share * NUM_SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self)).tolist())


def curriculum(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=Curriculum())


def harder(run: Run) -> None:
    run.loader.sampler.share = 1.0


def batch_sampler(worker: Any) -> DataLoader[Any]:
    whole = samples(91)
    return DataLoader(whole, batch_sampler=BatchSampler(RandomSampler(whole), BATCH_SIZE, drop_last=False))


def weighted(worker: Any) -> DataLoader[Any]:
    sampler = WeightedRandomSampler(torch.ones(NUM_SAMPLES).tolist(), NUM_SAMPLES)
    return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=sampler)


def weigh_by_own_losses(run: Run) -> None:
    """Hard samples come more often: each rank knows the losses of its own samples alone."""
    own = torch.arange(NUM_SAMPLES) % run.worker.size == run.worker.rank
    run.loader.sampler.weights = torch.where(own, 3.0, 1.0).double()


class Labelled(Dataset[Any]):
    """Samples whose labels may change."""

    def __init__(self) -> None:
        self.x, self.y, self.numbers = (tensor.clone() for tensor in samples().tensors)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], self.numbers[index]


def labelled(worker: Any) -> DataLoader[Any]:
    return DataLoader(Labelled(), batch_size=BATCH_SIZE, shuffle=True)


def label_anew(run: Run) -> None:
    """With what the model finds, for all samples."""
    with torch.no_grad():
        run.loader.dataset.y[:] = run.model(run.loader.dataset.x).argmax(1)


def label_own_anew(run: Run) -> None:
    """With what the model finds, for the samples that this rank has seen."""
    data = run.loader.dataset
    with torch.no_grad():
        own = torch.arange(NUM_SAMPLES) % run.worker.size == run.worker.rank
        own[0] = own[-1] = False
        data.y[own] = (data.y[own] + 1) % NUM_CLASSES


class Batch:
    """Of a kind of the script's own."""

    def __init__(self, items: list[Any]) -> None:
        self.parts = [torch.stack([item[place] for item in items]) for place in range(3)]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts)


def batches_of_a_class(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(91), batch_size=BATCH_SIZE, collate_fn=Batch)


def pinned(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE, pin_memory=True)


def keeping(batches: Any, *, kept: list[Any]) -> Iterator[Any]:
    """Keeps what it has trained on, and trains on it from then on."""
    if kept:
        yield from kept
        return
    for batch in batches:
        yield batch
        kept.append(batch)


def kept_with_tail(worker: Any, *, reads_first: bool) -> nn.Module:
    """Trains on what it has kept from the first pass, of which the last batch is smaller."""
    way: Any = partial(cached, kept={}) if reads_first else partial(keeping, kept=[])
    return train(worker, loader=lambda worker: loader_of(samples(91)), way=way)


def made_anew(worker: Any, *, first: int = 1) -> nn.Module:
    """Another loader of the same data in every epoch after the first, which prepare has not seen."""
    model = perceptron()
    loader: Any = DataLoader(samples(), batch_size=BATCH_SIZE)
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader)
    for epoch in range(3):
        if epoch >= first:
            loader = DataLoader(samples(), batch_size=BATCH_SIZE)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model


def from_tensors(worker: Any, *, beside: bool) -> nn.Module:
    """Slices tensors itself: after an epoch over the prepared loader, or one with each of its batches."""
    model = perceptron()
    loader: Any = DataLoader(samples(), batch_size=BATCH_SIZE)
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader)
    whole = samples().tensors

    def slices() -> Iterator[Any]:
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(3))
        return ([part[numbers] for part in whole] for numbers in order.split(BATCH_SIZE))

    for epoch in range(3):
        if beside:
            batches: Any = ([torch.cat(p) for p in zip(*pair, strict=True)] for pair in zip(loader, slices()))  # noqa: B905
        else:
            batches = slices() if epoch else loader
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model


def next_or_anew(worker: Any) -> nn.Module:
    """Steps are counted, and the loader is begun anew when it has ended."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples(91)))
    batches = iter(loader)
    for _ in range(30):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def skipping(worker: Any, *, when: Callable[[int, int, Tensor, Tensor], bool], count: int = NUM_SAMPLES) -> nn.Module:
    """Leaves out batches by `when(rank, number, x, loss)`."""
    model = perceptron()
    loader: Any = DataLoader(samples(count), batch_size=BATCH_SIZE)
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader)
    for number, batch in enumerate(itertools.chain(loader, loader), 1):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if when(worker.rank, number, batch[0], loss):
            continue
        loss.backward()
        optimizer.step()
    return model


def small(rank: int, number: int, x: Tensor, loss: Tensor) -> bool:
    return len(x) < BATCH_SIZE


def bad(rank: int, number: int, x: Tensor, loss: Tensor) -> bool:
    return not math.isfinite(float(loss) * (math.nan if rank and number == AT else 1.0))


class Scaled(nn.Module):
    """Has a parameter among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = perceptron(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x) * self.scale, self.scale


def each_norm(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of each sample's gradient."""

    def loss(parameters: Any, one: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(model, parameters, (one[None],))[0]
        return nn.functional.cross_entropy(output, label[None])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    return torch.stack([each.reshape(len(x), -1).norm(dim=1) for each in gradients.values()]).norm(dim=0)


def skipping_some(worker: Any, *, weighs: bool) -> nn.Module:
    """Asks for a batch, and takes another one."""
    model: nn.Module = Scaled()
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(91), batch_size=BATCH_SIZE, shuffle=True)
    )
    for number, (x, y, _) in enumerate(itertools.chain(loader, loader)):
        if number % 5 == 2:
            continue
        weights = 1 / (1 + each_norm(model, x, y)) if weighs else torch.ones(len(x))
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x)[0], y, reduction="none") * weights).mean().backward()
        optimizer.step()
    return model


def joined(worker: Any, *, every: int, count: int) -> nn.Module:
    """A backward pass for the losses of several batches."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(
        model, momentum(model.parameters()), DataLoader(samples(count), batch_size=BATCH_SIZE, shuffle=True)
    )
    losses: list[Tensor] = []
    for batch in itertools.chain(loader, loader):
        losses.append(loss_of(model, batch))
        if len(losses) == every:
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            losses.clear()
    return model


def stops_early(worker: Any) -> nn.Module:
    """Each rank by its own loss."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    for number, batch in enumerate(itertools.chain(loader, loader), 1):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if worker.rank and number == AT:
            break
    return model


def back_to_best(run: Run) -> None:
    """When this rank's own loss has grown."""
    if run.number == 3:
        run.kept = copy.deepcopy(run.model.state_dict())  # type: ignore[attr-defined]
    if run.number == AT and run.worker.rank:
        run.model.load_state_dict(run.kept)  # type: ignore[attr-defined]


def first_rank_alone(worker: Any) -> nn.Module:
    """As scripts have it whose author thinks of saving."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if worker.rank == 0:
            optimizer.step()
    return model


def in_double_by_default(worker: Any) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return train(worker)
    finally:
        torch.set_default_dtype(torch.float32)


SCRIPTS: dict[str, Callable[[Any], nn.Module]] = {
    "augmented at random": partial(train, loader=augmented),
    "drawn by numpy": partial(train, loader=partial(permuted, kind="numpy")),
    "drawn by Python": partial(train, loader=partial(permuted, kind="python")),
    "a curriculum": partial(train, loader=curriculum, passed=harder),
    "a batch sampler": partial(train, loader=batch_sampler),
    "weighted by own losses": partial(train, loader=weighted, passed=weigh_by_own_losses),
    "labelled anew": partial(train, loader=labelled, passed=label_anew),
    "own labelled anew": partial(train, loader=labelled, passed=label_own_anew),
    "batches of a class": partial(train, loader=batches_of_a_class),
    "pinned": partial(train, loader=pinned),
    "kept with a tail": partial(kept_with_tail, reads_first=False),
    "kept with a tail, read first": partial(kept_with_tail, reads_first=True),
    "loaders made anew": made_anew,
    "loaders made anew, later": partial(made_anew, first=2),
    "tensors in turns": partial(from_tensors, beside=False),
    "tensors beside": partial(from_tensors, beside=True),
    "begun anew": next_or_anew,
    "small ones left out": partial(skipping, when=small, count=91),
    "small ones left out, some": partial(skipping, when=small, count=95),
    "bad ones left out": partial(skipping, when=bad),
    "some left out, a parameter beside outputs": partial(skipping_some, weighs=False),
    "some left out, by gradients of each sample": partial(skipping_some, weighs=True),
    "losses of several batches": partial(joined, every=3, count=NUM_SAMPLES),
    "losses of several batches, with a tail": partial(joined, every=3, count=91),
    "losses of two batches, with a tail": partial(joined, every=2, count=91),
    "stops early": stops_early,
    "back to the best": partial(train, stepped=back_to_best),
    "the first rank alone": first_rank_alone,
    "in double by default": in_double_by_default,
}
