"""A run that is resumed with other samples in the places of its own is refused, and no other run is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.errors import RunFailed
from tests.conformance import local_engine, virtual_engine
from tests.conformance.reference import Script
from tests.conformance.scripts import BATCH_SIZE, launched, momentum, perceptron, plain_step, samples

STEPS_OF_AN_EPOCH = 12


def other_samples() -> TensorDataset:
    images, labels, numbers = samples()[:]
    return TensorDataset(images.flip(0), labels.flip(0), numbers)


def other_labels() -> TensorDataset:
    images, labels, numbers = samples()[:]
    return TensorDataset(images, 3 - labels, numbers)


def split(seed: int) -> Subset[Any]:
    return random_split(samples(192), [96, 96], generator=torch.Generator().manual_seed(seed))[0]


def rounded(share: float) -> TensorDataset:
    """As another processor computes them."""
    images, labels, numbers = samples()[:]
    return TensorDataset(images * (1 + share * torch.randn_like(images)), labels, numbers)


class Changed(Dataset[Any]):
    """Has its samples changed by a function of sample and epoch, which the script says."""

    def __init__(self, change: Callable[[Tensor, int], Tensor]) -> None:
        self.data, self.change, self.epoch = samples(), change, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, *rest = self.data[index]
        return self.change(x, self.epoch), *rest


def noisy(x: Tensor, epoch: int) -> Tensor:
    return x + torch.randn_like(x)


def mirrored(x: Tensor, epoch: int, *, draws: random.Random) -> Tensor:
    return x.flip(-1) if draws.random() < 0.5 else x


def fading(x: Tensor, epoch: int) -> Tensor:
    return x / (1 + epoch)


def train(
    worker: Any, *, data: Callable[[], Dataset[Any]], loader_workers: int = 0, differs: bool = False
) -> nn.Module:
    network, dataset = perceptron(), data()
    if differs:
        dataset.differs_by_run = True  # type: ignore[attr-defined]
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=loader_workers)
    network, optimizer, batches = worker.prepare(network, momentum(network.parameters()), loader)
    for epoch in range(3):
        if isinstance(dataset, Changed):
            dataset.epoch = epoch
        for batch in batches:
            plain_step(network, optimizer, batch)
    return network


def program(data: Callable[[], Dataset[Any]], **options: Any) -> Callable[[], None]:
    script: Script = partial(train, data=data, **options)
    return partial(launched, script)


REFUSED: dict[str, tuple[Callable[[], Dataset[Any]], Callable[[], Dataset[Any]]]] = {
    "another order": (samples, other_samples),
    "other labels": (samples, other_labels),
    "another split": (partial(split, 1), partial(split, 2)),
    "augmented": (partial(Changed, noisy), lambda: Changed(lambda x, epoch: noisy(x.flip(-1), epoch))),
}


@pytest.mark.parametrize("data", REFUSED)
def test_other_samples_are_refused(data: str, tmp_path: Path) -> None:
    first, second = REFUSED[data]
    check_refused(tmp_path, first, second)


@pytest.mark.parametrize("done", [STEPS_OF_AN_EPOCH, STEPS_OF_AN_EPOCH + 5], ids=["between", "later"])
@pytest.mark.parametrize("loader_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_other_samples_are_refused_in_a_later_epoch(done: int, loader_workers: int, tmp_path: Path) -> None:
    check_refused(tmp_path, samples, other_samples, done=done, loader_workers=loader_workers)


@pytest.mark.parametrize("strategy", ["single", "ps-asp", "gossip", "fed-avg"])
def test_other_samples_are_refused_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    options = {"clients": 2, "fraction": 1.0} if strategy == "fed-avg" else None
    workers = 1 if strategy == "single" else 2
    check_refused(tmp_path, samples, other_samples, done=2, strategy=strategy, options=options, workers=workers)


@pytest.mark.slow
def test_other_samples_are_refused_in_processes(tmp_path: Path) -> None:
    check_refused(tmp_path, samples, other_samples, engine=local_engine)


def check_refused(
    directory: Path,
    first: Callable[[], Dataset[Any]],
    second: Callable[[], Dataset[Any]],
    *,
    engine: Any = virtual_engine,
    done: int = 5,
    loader_workers: int = 0,
    strategy: str = "all-reduce",
    workers: int = 2,
    options: Any = None,
) -> None:
    run = partial(engine.run, strategy=strategy, workers=workers, options=options)
    run(program(first, loader_workers=loader_workers), out=directory / "begun", max_steps=done)
    with pytest.raises(RunFailed, match=r"sample 0 of the data set is not what it was.*resume with the same data set"):
        run(program(second, loader_workers=loader_workers), out=directory / "resumed", resume=directory / "begun")


def seeds() -> Iterator[int]:
    yield from range(1000)


SEEDS = seeds()
SAME: dict[str, tuple[Callable[[], Dataset[Any]], Callable[[], Dataset[Any]]]] = {
    "drawn anew": (partial(Changed, noisy),) * 2,
    "mirrored": (lambda: Changed(partial(mirrored, draws=random.Random(next(SEEDS)))),) * 2,
    "by epoch": (partial(Changed, fading),) * 2,
    "rounded": (samples, partial(rounded, 1e-6)),
}


@pytest.mark.parametrize("data", SAME)
@pytest.mark.parametrize("loader_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_only_seems_to_be_other_samples_is_gone_on_with(data: str, loader_workers: int, tmp_path: Path) -> None:
    first, second = SAME[data]
    run = partial(virtual_engine.run, strategy="single", workers=1)
    for number, done in enumerate((5, 5, STEPS_OF_AN_EPOCH + 5)):
        begun = tmp_path / f"begun{number}"
        run(program(first, loader_workers=loader_workers), out=begun, max_steps=done)
        resumed = tmp_path / f"resumed{number}"
        run(program(second, loader_workers=loader_workers), out=resumed, resume=begun, max_steps=done + 4)
        assert checkpoint(resumed).iteration == done + 4


def test_a_run_goes_on_with_other_samples_where_its_script_says_so(tmp_path: Path) -> None:
    run = partial(virtual_engine.run, strategy="all-reduce", workers=2)
    run(program(samples), out=tmp_path / "begun", max_steps=5)
    again = program(other_samples, differs=True)
    run(again, out=tmp_path / "resumed", resume=tmp_path / "begun", max_steps=9)
    run(program(other_samples), out=tmp_path / "on", resume=tmp_path / "resumed", max_steps=12)
    with pytest.raises(RunFailed, match="sample 0 of the data set is not what it was"):
        run(program(samples), out=tmp_path / "back", resume=tmp_path / "resumed", max_steps=12)


def test_a_checkpoint_that_says_nothing_of_samples_is_gone_on_from(tmp_path: Path) -> None:
    run = partial(virtual_engine.run, strategy="all-reduce", workers=2)
    run(program(samples), out=tmp_path / "begun", max_steps=5)
    older = replace(checkpoint(tmp_path / "begun"), looks={})
    (tmp_path / "begun" / FILE_NAME).write_bytes(older.encode())
    run(program(other_samples), out=tmp_path / "resumed", resume=tmp_path / "begun", max_steps=9)
    assert checkpoint(tmp_path / "resumed").iteration == 9


def checkpoint(directory: Path) -> Checkpoint:
    return Checkpoint.decode((directory / FILE_NAME).read_bytes(), where="here")
