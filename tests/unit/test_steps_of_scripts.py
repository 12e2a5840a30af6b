"""Whatever a script does between its steps, under `single` it does what it does in plain PyTorch; each step is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.alone import AloneCollective
from paceline.config import RunConfig
from paceline.errors import BudgetReached, NonFiniteGradient, UsageError
from paceline.membership import Membership
from paceline.records import Record, Reporter, StepRecord
from paceline.strategies import build
from paceline.strategies.base import Context
from paceline.training.given import told_apart
from paceline.training.session import Session

NUM_BATCHES, BATCH_SIZE = 8, 4
Script = Callable[[nn.Module, torch.optim.Optimizer, Any], None]


class Kept(Reporter):
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.stops_after = 10**9

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def save(self, name: str, content: bytes | memoryview) -> None:
        pass

    def stop_requested(self) -> bool:
        return len(self.steps) + 1 >= self.stops_after


def made() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    data = TensorDataset(torch.randn(NUM_BATCHES * BATCH_SIZE, 6), torch.arange(NUM_BATCHES * BATCH_SIZE) % 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(data, BATCH_SIZE)


def backward(model: nn.Module, batch: Any) -> None:
    x, y = batch
    F.cross_entropy(model(x), y).backward()


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()


def changes_its_rate(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for number, batch in enumerate(loader):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def clips(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        backward(model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for number, batch in enumerate(loader):
        backward(model, batch)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def steps_twice(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        optimizer.step()


def leaves_early(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for _ in range(2):
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            if number == 2:
                break


def gives_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for batch in loader:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)


def keeps_batches(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    kept = list(loader)
    for batch in kept:
        optimizer.zero_grad(set_to_none=False)
        backward(model, batch)
        optimizer.step()


SCRIPTS: dict[Script, list[int]] = {
    usual: [BATCH_SIZE] * 2 * NUM_BATCHES,
    changes_its_rate: [BATCH_SIZE] * NUM_BATCHES,
    clips: [BATCH_SIZE] * NUM_BATCHES,
    accumulates: [2 * BATCH_SIZE] * (NUM_BATCHES // 2),
    steps_twice: [BATCH_SIZE, 0] * NUM_BATCHES,
    leaves_early: [BATCH_SIZE] * 6,
    gives_a_closure: [BATCH_SIZE] * NUM_BATCHES,
    keeps_batches: [BATCH_SIZE] * NUM_BATCHES,
}
"""Each with the samples of its steps."""


def session_of(reporter: Reporter, config: RunConfig | None = None, **options: Any) -> Session:
    context = Context(0, Membership.first(1), 0, 1, torch.device("cpu"), AloneCollective())
    return Session(context, build("single", options), config or RunConfig(seed=0), reporter)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_it_trains_as_plain_torch_does(script: Script) -> None:
    plain, optimizer, data = made()
    script(plain, optimizer, data)
    model, optimizer, data = made()
    kept = Kept()
    session = session_of(kept)
    [loader] = session.prepare(told_apart((model, optimizer, data), {})).values()
    script(model, optimizer, loader)
    session.finish()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    told = [(record.step, record.iteration, record.samples, record.staleness) for record in kept.steps]
    assert told == [(step, step, samples, 0) for step, samples in enumerate(SCRIPTS[script], start=1)]
    times = [record.time_s for record in kept.steps]
    assert times == sorted(times)


def spoils(at: int) -> Script:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            backward(model, batch)
            if number == at:
                next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
            optimizer.step()

    return script


def test_a_gradient_that_is_no_number_is_told_in_any_step() -> None:
    model, optimizer, data = made()
    kept = Kept()
    session = session_of(kept)
    [loader] = session.prepare(told_apart((model, optimizer, data), {})).values()
    with pytest.raises(NonFiniteGradient, match=r"step 5: the gradient of parameter '0\.weight'"):
        spoils(4)(model, optimizer, loader)
    session.release()
    assert len(kept.steps) == 4
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_such_a_step_may_be_left_out() -> None:
    model, optimizer, data = made()
    kept = Kept()
    session = session_of(kept, nonfinite="skip")
    [loader] = session.prepare(told_apart((model, optimizer, data), {})).values()
    spoils(4)(model, optimizer, loader)
    session.finish()
    assert [record.staleness for record in kept.steps] == [-1 if step == 4 else 0 for step in range(NUM_BATCHES)]
    assert kept.steps[-1].iteration == NUM_BATCHES - 1


@pytest.mark.parametrize("by", ["budget", "stop"])
def test_a_run_ends_in_the_midst_of_a_pass(by: str) -> None:
    model, optimizer, data = made()
    kept = Kept()
    if by == "stop":
        kept.stops_after = 3
    session = session_of(kept, RunConfig(seed=0, max_steps=3) if by == "budget" else None)
    [loader] = session.prepare(told_apart((model, optimizer, data), {})).values()
    usual(model, optimizer, loader)
    assert len(kept.steps) == 3
    with pytest.raises(BudgetReached):
        optimizer.step()
    session.finish()


def test_an_error_of_elsewhere_is_raised_in_the_next_step() -> None:
    model, optimizer, data = made()
    session = session_of(Kept())
    [loader] = session.prepare(told_apart((model, optimizer, data), {})).values()
    batches = iter(loader)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, next(batches))
        optimizer.step()
    batch = next(batches)
    session.course.refuse(UsageError("said elsewhere"))
    backward(model, batch)
    with pytest.raises(UsageError, match="said elsewhere"):
        optimizer.step()
    assert next(batches, None) is None
    session.release()
