"""Clients of a script that does what scripts do: accumulates, warms up, schedules by the batch, and has bad data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance import virtual_engine
from tests.conformance.rows import keep, kept, launched

EVERYBODY = {"fraction": 1.0, "partition": "column:column=who"}


def run(script: Callable[[Worker, Path], None], out: Path, *, clients: int, **settings: Any) -> Result:
    options = {**EVERYBODY, "clients": clients, **settings.pop("options", {})}
    settings = {"strategy": "fed-avg", "workers": 1, **settings}
    return virtual_engine.run(partial(launched, script, out), out=out, options=options, **settings)


def data_of(sizes: Sequence[int]) -> TensorDataset:
    """So many samples of each client, which the column `who` names."""
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(sum(sizes), width, generator=generator).double() for width in (3, 1))
    data = TensorDataset(x, y)
    data.who = torch.cat([torch.full((size,), client) for client, size in enumerate(sizes)])  # type: ignore[attr-defined]
    return data


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model(x), y).backward()


def apart(one: Result, other: Result) -> float:
    first, second = one.model_state(), other.model_state()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def accumulate(worker: Worker, out: Path, *, sizes: Sequence[int]) -> None:
    """A step for each two batches; what a pass leaves over waits for the next one's, as in one process."""
    model, moved = network(), []
    model, optimizer, loader = worker.prepare(
        model, SGD(model.parameters(), lr=0.1), DataLoader(data_of(sizes), batch_size=2)
    )
    for _ in range(40):
        for number, (x, y) in enumerate(loader, 1):
            before = {name: each.detach().clone() for name, each in model.named_parameters()}
            backward(model, x, y)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
                moved.append(sorted({n[0] for n, each in model.named_parameters() if not torch.equal(each, before[n])}))
    keep(out, f"moved.{worker.rank}", moved)


def test_with_accumulation_private_layers_train_first_for_as_many_passes(tmp_path: Path) -> None:
    """They trained in all of the turn, and shared ones never."""
    run(partial(accumulate, sizes=[8, 8]), tmp_path, clients=2, strategy="fed-rep", max_steps=1)
    assert kept(tmp_path, "moved.0") == [["2"], ["2"], ["0"], ["0"]] * 2


def test_gradients_that_a_turn_leaves_over_are_no_other_clients(tmp_path: Path) -> None:
    """Nor is a turn without a step one in which the script changes parameters by hand."""
    sizes = [2, 6, 10, 2, 6]
    found = [
        run(partial(accumulate, sizes=sizes), tmp_path / str(workers), clients=5, workers=workers, max_steps=4)
        for workers in (1, 3, 6)
    ]
    assert apart(found[0], found[1]) < 1e-12
    assert apart(found[0], found[2]) < 1e-12


def warm_up(worker: Worker, out: Path, *, is_frozen: bool) -> None:
    """The head's rate is 0, or the head is frozen."""
    model = network()
    model[2].requires_grad_(not is_frozen)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
    model, optimizer, loader = worker.prepare(model, SGD(groups, lr=0.1), DataLoader(data_of([6, 8]), batch_size=2))
    for _ in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()


def test_a_rate_of_zero_leaves_control_variates_as_they_were(tmp_path: Path) -> None:
    still, frozen = (
        run(
            partial(warm_up, is_frozen=is_frozen),
            tmp_path / str(is_frozen),
            clients=2,
            strategy="scaffold",
            max_steps=4,
        )
        for is_frozen in (False, True)
    )
    assert apart(still, frozen) < 1e-12


class Rarely(nn.Module):
    """Has two numbers, of which batches use the second only where they say so."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rare = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))

    def forward(self, slope: Tensor, *, uses_both: bool) -> Tensor:
        return slope * (self.often + self.rare if uses_both else self.often)


def use_now_and_then(worker: Worker, out: Path) -> None:
    """The second of a client's two batches uses both; the slope is 1 for one client, and 3 for the other."""
    model = Rarely()
    data = TensorDataset(torch.tensor([1.0, 1.0, 3.0, 3.0]).double())
    data.who = torch.tensor([0, 0, 1, 1])  # type: ignore[attr-defined]
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=1))
    ends = []
    for _ in range(6):
        for number, (slope,) in enumerate(loader):
            optimizer.zero_grad()
            model(slope, uses_both=number == 1).sum().backward()
            optimizer.step()
            if number == 1:
                ends.append([float(each.detach()) for each in model.parameters()])
    keep(out, "ends", ends)


def test_control_variates_are_of_the_steps_that_had_a_gradient(tmp_path: Path) -> None:
    """From the second round on each client follows the mean client's slope, 2, wherever it takes such a step."""
    result = run(use_now_and_then, tmp_path, clients=2, strategy="scaffold", max_steps=3)
    ends = torch.tensor(kept(tmp_path, "ends"))
    torch.testing.assert_close(ends[2:4], torch.tensor([[-0.8, -0.4]] * 2))
    torch.testing.assert_close(ends[4:6], torch.tensor([[-1.2, -0.6]] * 2))
    assert [float(each) for each in result.model_state().values()] == pytest.approx([-1.2, -0.6])


def in_half(worker: Worker, out: Path) -> None:
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.ones_(model.weight)
    data = TensorDataset(torch.ones(40_000, 1).half())
    data.who = torch.arange(40_000) // 10_000  # type: ignore[attr-defined]
    model, optimizer, loader = worker.prepare(
        model, SGD(model.parameters(), lr=1.0), DataLoader(data, batch_size=10_000)
    )
    for _ in range(8):
        for (x,) in loader:
            optimizer.zero_grad()
            (4 * model(x[:1])).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("aggregate", ["mean", "median"])
def test_sums_of_halves_have_room_for_weights(aggregate: str, tmp_path: Path) -> None:
    """Four clients with 10,000 samples each, of which 160,000 comes: more than the largest float16."""
    result = run(in_half, tmp_path, clients=4, workers=2, options={"aggregate": aggregate}, max_steps=1)
    assert result.model_state()["weight"].tolist() == [[-3.0]]


def see_no_number(worker: Worker, out: Path, *, bad: slice) -> None:
    """Batches of one client hold a NaN, which comes into running statistics although steps are left out."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    data = data_of([4, 4, 4])
    data.tensors[0][bad] = torch.nan
    worker.evaluation(lambda model: {"sum": float(sum(each.double().sum() for each in model.state_dict().values()))})
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2))
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()


@pytest.mark.parametrize(
    ("private", "bad"),
    [("", slice(5, 6)), ("norm", slice(4, 8)), ("norm", slice(5, 6))],
    ids=["shared", "private", "private, and one good batch"],
)
def test_statistics_of_bad_data_do_not_count(private: str, bad: slice, tmp_path: Path) -> None:
    options = {"private": private, "nonfinite": "skip"}
    result = run(partial(see_no_number, bad=bad), tmp_path, clients=3, workers=3, options=options, max_steps=2)
    assert all(bool(each.isfinite().all()) for each in result.model_state().values())
    assert result.iteration == 2


def gently(optimizer: SGD) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def by_milestones(optimizer: SGD) -> LRScheduler:
    """Keeps its milestones in a Counter, of which plain copies of dicts make something else."""
    return MultiStepLR(optimizer, milestones=[*range(3, 60, 3)], gamma=0.8)


def step_by_step(worker: Worker, out: Path, *, scheduled: Callable[[SGD], LRScheduler] = gently) -> None:
    model = network()
    worker.evaluation(lambda model: {"sum": float(sum(each.sum() for each in model.parameters()))})
    schedule = scheduled(optimizer := SGD(model.parameters(), lr=0.1))
    loader = DataLoader(data_of([2, 8, 4, 2]), batch_size=2)
    model, optimizer, loader = worker.prepare(model, optimizer, loader, schedule=schedule)
    for _ in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize(
    ("workers", "options", "scheduled"),
    [
        (2, {"fraction": 0.5}, gently),
        (2, {"fraction": 0.5}, by_milestones),
        (3, {"fraction": 0.25, "private": "2"}, gently),
    ],
    ids=["schedules of their own", "milestones of their own", "workers without a client"],
)
def test_each_worker_goes_on_from_its_own_place(
    workers: int, options: dict[str, Any], scheduled: Callable[[SGD], LRScheduler], tmp_path: Path
) -> None:
    """Schedulers that workers have stepped as often as their clients have batches, and private layers of whoever a
    worker has played last: it may play nobody for rounds."""
    settings: dict[str, Any] = {"clients": 4, "workers": workers, "options": options, "eval_every": 1}
    script = partial(step_by_step, scheduled=scheduled)
    whole = run(script, tmp_path / "whole", max_steps=7, **settings)
    run(script, tmp_path / "begun", max_steps=4, **settings)
    resumed = run(script, tmp_path / "resumed", max_steps=7, resume=tmp_path / "begun", **settings)
    sums = [[each.metrics["sum"] for each in result.evaluations if each.iteration > 4] for result in (whole, resumed)]
    assert sums[0] == sums[1]
    assert len(sums[0]) == 3
    assert apart(whole, resumed) == 0.0


@pytest.mark.parametrize(("fraction", "are_kept"), [(1.0, False), (0.5, True)], ids=["alike", "apart"])
def test_a_workers_schedules_are_kept_where_they_are_not_the_first_ones(
    fraction: float, are_kept: bool, tmp_path: Path
) -> None:
    """Of a large state, such as an average of the model, a checkpoint holds one, and not as many as there are workers.
    With all clients both workers have as many batches."""
    run(step_by_step, tmp_path, clients=4, workers=2, options={"fraction": fraction}, max_steps=1)
    checkpoint = Checkpoint.decode((tmp_path / FILE_NAME).read_bytes(), where="")
    assert [worker.script is not None for worker in checkpoint.workers] == [False, are_kept]


class OfOneRank:
    """Has a state that a checkpoint cannot hold, nor a message, on the ranks after the first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rule": (lambda: None) if self._rank else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def keep_a_rule(worker: Worker, out: Path) -> None:
    model, rule = network(), OfOneRank(worker.rank)
    loader = DataLoader(data_of([2, 2]), batch_size=2)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader, rule=rule)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()


def test_the_first_rank_refuses_what_a_checkpoint_cannot_hold_of_anothers(tmp_path: Path) -> None:
    """Whoever raised before the first one has its part would have it wait."""
    with pytest.raises(Exception, match=r"rank 1: a checkpoint holds plain data .* the state of 'rule'"):
        run(keep_a_rule, tmp_path, clients=2, workers=2, max_steps=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"strategy": "fed-rep"}, {"strategy": "fed-avg"}),
        ({"strategy": "fed-avg", "options": {"private": "2"}}, {"strategy": "fed-avg", "options": {"private": "0"}}),
        ({"strategy": "fed-avgm"}, {"strategy": "fed-adam"}),
        ({"strategy": "fed-adam"}, {"strategy": "fed-avg", "options": {"outer": "adam"}}),
    ],
    ids=["all shared", "others private", "moments", "bias correction"],
)
def test_a_run_goes_on_under_another_name(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """What clients or the server kept for the one, and the other does not know, is left."""
    settings: dict[str, Any] = {"clients": 4, "workers": 2}
    run(step_by_step, tmp_path / "begun", max_steps=2, **settings, **before)
    result = run(step_by_step, tmp_path / "resumed", max_steps=3, resume=tmp_path / "begun", **settings, **after)
    assert result.iteration == 3
    assert all(bool(each.isfinite().all()) for each in result.model_state().values())
