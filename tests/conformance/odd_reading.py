"""Scripts that go other ways through their data, and the loaders that they go through, for `test_odd_scripts`."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.conformance.scripts import (
    BATCH_SIZE,
    NUM_CLASSES,
    loader_of,
    momentum,
    perceptron,
    plain_step,
    samples,
)

NUM_WORKERS, NUM_EPOCHS, NUM_SAMPLES = 2, 3, 91
"""The last global batch of an epoch is divided into one sample and two."""

Batches = Iterable[Any]


def train(
    worker: Any,
    *,
    way: Callable[[Batches], Iterable[Any]] = iter,
    loader: Callable[[Any], DataLoader[Any]] = lambda worker: loader_of(samples(NUM_SAMPLES)),
    model: Callable[[], nn.Module] = perceptron,
    accumulates: bool = False,
    no_sync: bool = False,
) -> nn.Module:
    """Train on what comes out of `way(loader)`, epoch after epoch."""
    network = model()
    network, optimizer, batches = worker.prepare(network, momentum(network.parameters()), loader(worker))
    for _ in range(NUM_EPOCHS):
        optimizer.zero_grad()
        for number, (x, y, *_) in enumerate(way(batches), 1):
            if not accumulates:
                plain_step(network, optimizer, (x, y))
                continue
            with worker.no_sync() if no_sync and number % 2 else nullcontext():
                nn.functional.cross_entropy(network(x), y).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return network


def losses_first(worker: Any, *, copies: bool = False, last_first: bool = False) -> nn.Module:
    """Computes the losses of two batches, calls backward on one after the other, and steps."""
    network = perceptron()
    network, optimizer, batches = worker.prepare(
        network, momentum(network.parameters()), loader_of(samples(NUM_SAMPLES))
    )
    for _ in range(NUM_EPOCHS):
        remaining = in_chunks(batches, size=2, copies=copies)
        while pair := list(itertools.islice(remaining, 2)):
            optimizer.zero_grad()
            losses = [nn.functional.cross_entropy(network(x), y) for x, y, *_ in pair]
            for loss in reversed(losses) if last_first else losses:
                loss.backward()
            optimizer.step()
    return network


def beside_noise(worker: Any) -> nn.Module:
    """Reads a batch ahead, and trains on noise of one length beside each, as a GAN does."""
    network = perceptron()
    network, optimizer, batches = worker.prepare(
        network, momentum(network.parameters()), loader_of(samples(NUM_SAMPLES))
    )
    noise, *_ = samples(BATCH_SIZE)[:]
    for _ in range(NUM_EPOCHS):
        for x, y, *_ in ahead(batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            network(noise).square().mean().backward()
            optimizer.step()
    return network


# --- ways through the data ------------------------------------------------------------------------------------------


def ahead(batches: Batches, *, depth: int = 1, copies: bool = False) -> Iterator[Any]:
    """Has asked for `depth` more batches whenever one is trained on, perhaps as copies, as on another device."""
    out: list[Any] = []
    for batch in batches:
        out.append([tensor.clone() for tensor in batch] if copies else batch)
        del batch
        if len(out) > depth:
            yield out.pop(0)
    while out:
        yield out.pop(0)


def scaled(batches: Batches) -> Iterator[Any]:
    """Has asked for one more batch whenever one is trained on, and trains on what it makes of each."""
    for x, *rest in ahead(batches):
        yield 2 * x, *rest


def in_chunks(batches: Batches, *, size: int = 5, copies: bool = False) -> Iterator[Any]:
    """Asks for five batches, trains on each, perhaps as copies, and asks for the next five."""
    remaining = iter(batches)
    while chunk := list(itertools.islice(remaining, size)):
        yield from ([tensor.clone() for tensor in batch] for batch in chunk) if copies else chunk


def in_thread(batches: Batches) -> Iterator[Any]:
    """Another thread asks for batches."""
    read: queue.Queue[Any] = queue.Queue(maxsize=3)

    def fill() -> None:
        for batch in batches:
            read.put(batch)
        read.put(None)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    while (batch := read.get()) is not None:
        yield batch


def without(batches: Batches, *, numbers: tuple[int, ...]) -> Iterator[Any]:
    """Leaves some batches of every epoch out."""
    for number, batch in enumerate(batches):
        if number not in numbers:
            yield batch


def twice(batches: Batches, *, way: Callable[[Batches], Iterable[Any]] = iter) -> Iterator[Any]:
    """Two steps a batch."""
    for batch in way(batches):
        yield batch
        yield batch


def only(batches: Batches, *, count: int) -> Iterator[Any]:
    yield from itertools.islice(iter(batches), count)


def from_another(batches: Batches) -> Iterator[Any]:
    """Reads a loader that was not prepared, which gives every rank all samples."""
    yield from loader_of(samples(NUM_SAMPLES))


# --- data -----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """The samples in order, over and over if they have no end; or one rank's share of them."""

    def __init__(self, *, is_endless: bool = False, rank: int = 0, size: int = 1) -> None:
        self.is_endless, self.rank, self.size = is_endless, rank, size
        self.splits_by_rank = size > 1
        self.data = samples(NUM_SAMPLES)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        numbers = range(len(self.data))
        for number in itertools.cycle(numbers) if self.is_endless else numbers[self.rank :: self.size]:
            yield self.data[number]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(NUM_SAMPLES))


def slices(worker: Any) -> DataLoader[Any]:
    """Batches that all lie in one memory."""
    whole = samples(NUM_SAMPLES).tensors

    def collate(numbers: list[int]) -> list[Tensor]:
        return [tensor[numbers[0] : numbers[-1] + 1] for tensor in whole]

    return DataLoader(range(NUM_SAMPLES), batch_size=BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type]


def stream(worker: Any, *, is_endless: bool = False, splits: bool = False, num_workers: int = 0) -> DataLoader[Any]:
    share = {"rank": worker.rank, "size": worker.size} if splits else {}
    return DataLoader(Stream(is_endless=is_endless, **share), batch_size=BATCH_SIZE, num_workers=num_workers)


def endless_sampler(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(NUM_SAMPLES), batch_size=BATCH_SIZE, sampler=Endless())


def unequal_batches(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE + worker.rank)


def unequal_data(worker: Any) -> DataLoader[Any]:
    return DataLoader(samples(NUM_SAMPLES - worker.rank), batch_size=BATCH_SIZE)


def of_samples(worker: Any, *, count: int) -> DataLoader[Any]:
    return loader_of(samples(count))


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, NUM_CLASSES)).double()
