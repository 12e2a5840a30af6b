"""A resumed run goes on with the batch that comes next, also of a stream or of one read ahead; or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.errors import RunFailed
from tests.conformance import local_engine, virtual_engine
from tests.conformance.odd_reading import NUM_WORKERS, Stream, ahead, in_chunks, in_thread, stream, train
from tests.conformance.reference import Script
from tests.conformance.scripts import BATCH_SIZE, launched, samples


class Shuffled(Stream):
    """Takes its samples out of a buffer at random, and augments them."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        buffer: list[tuple[Tensor, ...]] = []
        for x, *rest in super().__iter__():
            buffer.append((x + 0.1 * torch.randn_like(x), *rest))
            if len(buffer) > 9:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        yield from buffer


class Stateful(Stream):
    """Goes on by itself where it was."""

    begins, at = 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        begins, self.begins = self.begins, 0
        for number in range(begins, len(self.data)):
            self.at = number + 1
            yield self.data[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


def of(kind: Callable[..., Stream], worker: Any, *, splits: bool = False) -> DataLoader[Any]:
    return DataLoader(kind(**({"rank": worker.rank, "size": worker.size} if splits else {})), batch_size=BATCH_SIZE)


WAYS: dict[str, Script] = {
    "one ahead": partial(train, way=ahead),
    "in chunks": partial(train, way=in_chunks),
    "a stream": partial(train, loader=stream),
    "a shuffled stream": partial(train, loader=partial(of, Shuffled)),
    "a shuffled stream that splits itself": partial(train, loader=partial(of, Shuffled, splits=True)),
    "a stream that knows where it is": partial(train, loader=partial(of, Stateful)),
    "a stream that splits itself and knows where it is": partial(train, loader=partial(of, Stateful, splits=True)),
    "a stream of loader workers": partial(train, loader=partial(stream, num_workers=2)),
    "a stream that splits itself, of loader workers": partial(
        train, loader=partial(stream, splits=True, num_workers=2)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("done", [7, *(pytest.param(done, marks=pytest.mark.slow) for done in (12, 17))])
def test_a_resumed_run_takes_the_batches_that_come_next(way: str, done: int, tmp_path: Path) -> None:
    check_resumed(virtual_engine, WAYS[way], done, tmp_path)


@pytest.mark.parametrize("way", [in_thread, ahead])
def test_batches_read_ahead_are_not_lost_in_processes(way: Any, tmp_path: Path) -> None:
    check_resumed(local_engine, partial(train, way=way), 7, tmp_path)


def check_resumed(engine: ModuleType, script: Script, done: int, directory: Path) -> None:
    run = partial(engine.run, partial(launched, script), strategy="all-reduce", workers=NUM_WORKERS)
    run(out=directory / "whole", max_steps=30)
    run(out=directory / "begun", max_steps=done)
    run(out=directory / "resumed", max_steps=30, resume=directory / "begun")
    whole, resumed = (
        Checkpoint.decode((directory / name / FILE_NAME).read_bytes(), where=name) for name in ("whole", "resumed")
    )
    assert resumed.workers[1].num_batches_done == whole.workers[1].num_batches_done
    assert resumed.workers[1].samples == whole.workers[1].samples
    assert all(torch.equal(resumed.model[name], tensor) for name, tensor in whole.model.items())


def other(worker: Any, *, count: int = 96, batch_size: int = BATCH_SIZE, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=batch_size, shuffle=shuffle)


def with_replacement(worker: Any) -> DataLoader[Any]:
    data = samples(96)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=RandomSampler(data, replacement=True))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (partial(other, batch_size=8), "the checkpoint's DataLoader has batch size 4, this one has batch size 8"),
        (partial(other, count=64), "the checkpoint's DataLoader has samples 96, this one has samples 64"),
        (partial(other, shuffle=False), "the checkpoint's DataLoader draws the order"),
        (with_replacement, "the checkpoint's DataLoader draws the order"),
        (stream, "the checkpoint's DataLoader has samples 96, this one has samples None"),
    ],
    ids=["batch size", "data", "order", "sampler", "stream"],
)
def test_other_data_than_the_checkpoints_is_refused(loader: Any, message: str, tmp_path: Path) -> None:
    run = partial(virtual_engine.run, strategy="all-reduce", workers=NUM_WORKERS)
    run(partial(launched, partial(train, loader=other)), out=tmp_path / "begun", max_steps=5)
    with pytest.raises(RunFailed, match=message + ".*resume with the same data set, batch size and order"):
        run(partial(launched, partial(train, loader=loader)), out=tmp_path / "resumed", resume=tmp_path / "begun")


ELSEWHERE: dict[str, dict[str, Any]] = {
    "ps-bsp": {},
    "ps-ssp": {},
    "ps-asp": {},
    "gossip": {},
    "ad-psgd": {},
    "local-sgd": {"every": 3},
    "async-diloco": {},
    "fed-avg": {"clients": 2, "fraction": 1.0, "optimizer": "kept"},
}


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [
        *((virtual_engine, strategy) for strategy in ELSEWHERE),
        pytest.param(local_engine, "all-reduce", marks=pytest.mark.slow),
        pytest.param(local_engine, "ps-bsp", marks=pytest.mark.slow),
    ],
)
def test_another_batch_size_is_refused_under_every_strategy(engine: ModuleType, strategy: str, tmp_path: Path) -> None:
    run = partial(engine.run, strategy=strategy, workers=NUM_WORKERS, options=ELSEWHERE.get(strategy))
    run(partial(launched, partial(train, loader=other)), out=tmp_path / "begun", max_steps=2)
    script = partial(launched, partial(train, loader=partial(other, batch_size=8)))
    with pytest.raises(RunFailed, match="has batch size 4, this one has batch size 8; resume with the same data set"):
        run(script, out=tmp_path / "resumed", resume=tmp_path / "begun")
