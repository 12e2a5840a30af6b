"""The steps of a script of Horovod's, as they are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import RunConfig
from paceline.engines.world import alone, current, enter
from paceline.errors import BudgetReached, UsageError
from paceline.records import EventRecord, Record, Reporter, StepRecord
from paceline.strategies import build
from paceline.training.worker import init
from tests.horovod.world import HorovodWorld


class Kept(Reporter):
    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def save(self, name: str, content: bytes | memoryview) -> None:
        raise AssertionError("the script saves by itself")

    def stop_requested(self) -> bool:
        return False


def test_steps_samples_and_times(tmp_path: Path) -> None:
    with HorovodWorld(2, tmp_path) as world:
        for rank, (records, time_s) in enumerate(world.run(_train)):
            events = [each for each in records if isinstance(each, EventRecord)]
            assert [event.name for event in events] == ["training"] * (rank == 0)
            steps = [each for each in records if isinstance(each, StepRecord)]
            assert [(each.worker, each.step, each.iteration) for each in steps] == [(rank, n, n) for n in (1, 2, 3)]
            assert [each.samples for each in steps] == [4, 4, 2]
            assert all(each.moved_bytes > 0 and each.communication_s + each.hidden_s > 0 for each in steps)
            parts_s = sum(each.compute_s + each.communication_s + each.waiting_s for each in steps)
            assert parts_s == pytest.approx(steps[-1].time_s, rel=1e-3)
            assert steps[-1].time_s <= time_s


def _train(rank: int) -> tuple[list[Record], float]:
    """Steps with batches of 4, 4 and 2, beside an evaluation and a second optimizer that do not count."""
    import time

    import paceline.horovod.torch as hvd

    world = current()
    assert world is not None
    world.strategy, world.reporter, world.config = build("horovod"), Kept(), RunConfig(max_steps=3)
    began_s = time.perf_counter()
    hvd.init()
    model, other = torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)
    optimizer, beside = (
        hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), each.named_parameters(prefix=name))
        for name, each in (("model", model), ("other", other))
    )
    loader = DataLoader(TensorDataset(torch.ones(10, 3)), batch_size=4)

    def train() -> None:
        while True:
            for (x,) in loader:
                optimizer.zero_grad()
                other(model(x)).mean().backward()
                beside.step()
                optimizer.step()
                with torch.no_grad():
                    assert sum(len(y) for (y,) in loader) == 10

    with pytest.raises(BudgetReached):
        train()
    assert isinstance(world.reporter, Kept)
    assert world.progress() == 3
    return world.reporter.records, time.perf_counter() - began_s


def test_a_script_of_paceline_s_own_takes_another_strategy() -> None:
    world = alone()
    world.strategy = build("horovod")
    enter(world)
    try:
        model = torch.nn.Linear(1, 1)
        data = DataLoader(TensorDataset(torch.ones(2, 1)))
        with pytest.raises(UsageError, match=r"call hvd.init\(\).*--strategy all-reduce runs it"):
            init().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    finally:
        world.context.collective.close()
        enter(None)
