"""Statistics of batch norm of a model that is the mean of several are its own, and not the mean of theirs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.base import Collective, Finished
from paceline.training.running_statistics import NUM_BATCHES, RunningStatistics
from paceline.training.worker import Worker
from tests.conformance.rows import keep, kept
from tests.conformance.virtual_cluster import cluster_of, run

WORKERS, EVERY, ROUNDS, BATCH = 3, 30, 2, 8
FEATURES = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
    return nn.Sequential(*layers)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(WORKERS * EVERY * ROUNDS * BATCH, FEATURES, generator=generator)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def train(worker: Worker, out: Path, *, rate: float) -> None:
    model = network()
    loader = DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), rate, momentum=0.9), loader)
    worker.evaluation(lambda given: {"variance": float(given.get_buffer("2.running_var").mean())})
    batches = []
    for x, y in loader:
        batches.append(x.clone())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    keep(out, f"batches-{worker.rank}", batches)
    keep(out, f"own-{worker.rank}", {name: tensor.clone() for name, tensor in model.named_buffers()})


def naive(state: dict[str, Tensor], batches: Sequence[Sequence[Tensor]]) -> Tensor:
    """The twin: the variance in each of all workers' last batches; of these the mean."""
    model, found = network(), []
    model.load_state_dict(state)
    for each in batches:
        with torch.no_grad():
            found += [model[1](model[0](x)).var(dim=0) for x in each[-NUM_BATCHES:]]
    return torch.stack(found).mean(dim=0)


@pytest.mark.parametrize(
    "strategy", ["local-sgd", "diloco:fragments=2:alpha=0.5", "async-diloco:quorum=3", "async-diloco:quorum=1"]
)
def test_a_mean_of_models_is_evaluated_and_saved_with_statistics_of_its_own(strategy: str, tmp_path: Path) -> None:
    """Also where workers are through with their data before the servers are with all changes."""
    name, *options = strategy.split(":")
    settings = dict(each.split("=") for each in options) | {"every": EVERY}
    script = partial(train, rate=0.2)
    result = run(script, tmp_path, name, WORKERS, cluster=cluster_of(), options=settings)
    state = result.model_state()
    own = [kept(tmp_path, f"own-{rank}") for rank in range(WORKERS)]
    batches = [kept(tmp_path, f"batches-{rank}") for rank in range(WORKERS)]
    assert [len(each) for each in batches] == [EVERY * ROUNDS] * WORKERS
    found = state["2.running_var"]
    torch.testing.assert_close(found, naive(state, batches))
    assert result.metrics["variance"] == pytest.approx(float(found.mean()))
    means = torch.stack([one["2.running_var"] for one in own]).mean(dim=0)
    assert not torch.allclose(found, means, rtol=1e-2)


def test_they_are_those_of_what_the_mean_model_makes_of_the_data(tmp_path: Path) -> None:
    """At a high rate models come apart. The mean of their variances is off by more than twice as much."""
    script = partial(train, rate=0.5)
    result = run(script, tmp_path, "local-sgd", WORKERS, cluster=cluster_of(), options={"every": EVERY}, max_steps=1)
    state = result.model_state()
    model = network()
    model.load_state_dict(state)
    true = model[1](model[0](data().tensors[0])).detach().var(dim=0)
    means = torch.stack([kept(tmp_path, f"own-{rank}")["2.running_var"] for rank in range(WORKERS)]).mean(dim=0)
    off, means_off = (float((each / true).log().abs().mean()) for each in (state["2.running_var"], means))
    assert means_off > 2 * off


class Odd(nn.Module):
    """Counts its calls, takes its input by name, draws in evaluations too, and has a norm of which the script may
    freeze statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm, self.drop = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, *, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        x = x + 0 * torch.rand_like(x)
        return torch.as_tensor(self.norm(self.drop(self.frozen(x))))


class Beside:
    """A world of two whose other worker adds what it is told to."""

    size = 2

    def __init__(self, other: Tensor | None = None) -> None:
        self._other = other

    def all_reduce(self, tensor: Tensor, *, op: str) -> Finished:
        assert op == "sum"
        if self._other is not None:
            tensor += self._other
        return Finished()


def looked_at(statistics: RunningStatistics, other: Tensor | None = None) -> AbstractContextManager[None]:
    return statistics.of_mean(cast(Collective, Beside(other)))


def test_all_else_stays() -> None:
    """What a script counts in forward passes, its random numbers, frozen statistics, and modes."""
    model = Odd()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    model.frozen.eval()
    model(x=torch.randn(5, 2) + 3)
    before = copy.deepcopy(dict(model.named_buffers()))
    state = torch.get_rng_state()
    with looked_at(statistics):
        assert not torch.equal(model.get_buffer("norm.running_mean"), before["norm.running_mean"])
        for name in ("calls", "norm.num_batches_tracked", "frozen.running_mean", "frozen.running_var"):
            assert torch.equal(model.get_buffer(name), before[name])
        assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
        assert model.norm.momentum == 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_of_an_earlier_round_and_of_evaluations_do_not_count() -> None:
    model, rounds = Odd(), [0]
    statistics = RunningStatistics(model, rounds=lambda: rounds[0])
    model.frozen.eval()
    model(x=torch.full((5, 2), 100.0))
    rounds[0] = 1
    for _ in range(3):
        model(x=batch(mean=10.0))
    model.norm.get_buffer("running_mean").fill_(2.0)
    model.eval()(x=torch.full((5, 2), 100.0))
    with looked_at(statistics):
        assert means(model) == pytest.approx([0.3 * 10 + 0.7 * 2] * 2, rel=1e-4)


def others(count: float, *statistics: float, norms: int = 2, has_gone_on: float = 1.0) -> Tensor:
    """What another worker adds that has seen so many batches with all these statistics of each norm of two channels."""
    values = torch.tensor(statistics).repeat(4 * norms // len(statistics))
    return torch.cat([torch.tensor([has_gone_on]), torch.full((4 * norms,), count), count * values]).double()


def batch(mean: float = 0.0) -> Tensor:
    """Of five rows and two channels, with the variance 10."""
    return torch.arange(10.0).view(5, 2).sub(torch.tensor([4.0, 5.0])).add(mean)


def means(model: nn.Module, norm: str = "norm") -> list[float]:
    return [float(each) for each in model.get_buffer(f"{norm}.running_mean")]


def test_workers_count_by_their_batches() -> None:
    """Whoever has none, as one who has joined, has what the others have."""
    model = Odd()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    model.frozen.eval()
    with looked_at(statistics, others(12, 2.0)):
        assert means(model) == pytest.approx([2.0, 2.0])
    for _ in range(4):
        model(x=batch(mean=10.0))
    with looked_at(statistics, others(12, 2.0)):
        assert means(model) == pytest.approx([4.0, 4.0], rel=1e-4)
    with looked_at(RunningStatistics(Odd(), rounds=lambda: 0)):
        pass


def test_few_batches_are_joined_by_the_mean_of_the_workers_statistics() -> None:
    model = Odd()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    model.frozen.eval()
    for _ in range(3):
        model(x=batch(mean=10.0))
    model.norm.get_buffer("running_mean").fill_(2.0)
    with looked_at(statistics):
        assert means(model) == pytest.approx([0.3 * 10 + 0.7 * 2] * 2, rel=1e-4)


def test_what_counts_nothing_may_be_infinite() -> None:
    """Statistics of a norm that is frozen here and not elsewhere, and workers' own beside batches enough."""
    model = Odd()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    for _ in range(NUM_BATCHES):
        model(x=batch())
    for name in ("frozen", "norm"):
        model.get_buffer(f"{name}.running_mean").fill_(torch.inf)
    with looked_at(statistics):
        assert means(model, "frozen") == pytest.approx([0.0, 0.0], abs=1e-5)
    model.frozen.eval()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    for _ in range(NUM_BATCHES):
        model(x=batch())
    with looked_at(statistics, others(10, 3.0)):
        assert means(model, "frozen") == [3.0, 3.0]


def test_restored_statistics_hold_until_a_worker_has_ended_a_round() -> None:
    """Also where no batch ever comes, as with a model of which only parts are called."""
    model, rounds = Odd(), [4]
    statistics = RunningStatistics(model, rounds=lambda: rounds[0])
    model.get_buffer("norm.running_mean").fill_(7.0)
    statistics.restore(rounds=4)
    model.get_buffer("norm.running_mean").fill_(1.0)  # this worker's own
    with looked_at(statistics):
        assert means(model) == [7.0, 7.0]
    with looked_at(statistics, others(0, 0.0)):  # the other worker has ended one
        assert means(model) == [1.0, 1.0]
    rounds[0] = 5
    with looked_at(statistics):
        assert means(model) == [1.0, 1.0]
    assert means(model) == [1.0, 1.0]


class PerTask(nn.Module):
    """Has a norm for each task, and one that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)})
        self.auxiliary = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, task: str) -> Tensor:
        out = self.tasks[task](x)
        return torch.as_tensor(self.auxiliary(out) if self.training else out)


def test_each_norm_counts_by_the_batches_that_reach_it() -> None:
    model = PerTask()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    for _ in range(5):
        model(batch(mean=10.0), "a")
    model(batch(mean=20.0), "b")
    for norm in ("tasks.a", "tasks.b", "auxiliary"):
        model.get_buffer(f"{norm}.running_mean").fill_(3.0)
    with looked_at(statistics):
        assert means(model, "tasks.a") == pytest.approx([0.5 * 10 + 0.5 * 3] * 2, rel=1e-4)
        assert means(model, "tasks.b") == pytest.approx([0.1 * 20 + 0.9 * 3] * 2, rel=1e-4)
        assert means(model, "auxiliary") == [3.0, 3.0]


class Shifting(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(x.sub_(100.0)))


def test_a_batch_that_was_changed_in_place_does_not_count() -> None:
    model = Shifting()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    model(torch.arange(10.0).view(5, 2) + 100)
    before = model.get_buffer("norm.running_mean").clone()
    with looked_at(statistics):
        assert torch.equal(model.get_buffer("norm.running_mean"), before)


def test_nothing_is_kept_where_there_is_nothing_to_take() -> None:
    plain = nn.Linear(2, 2)
    statistics = RunningStatistics(plain, rounds=lambda: 0)
    assert not plain._forward_pre_hooks
    with looked_at(statistics):
        pass


class Merging(nn.Module):
    """Does more in `train` than torch's, as layers that merge their weights for evaluations do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.merges = nn.BatchNorm1d(2), 0

    def train(self, mode: bool = True) -> Merging:
        self.merges += not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.merges
        return torch.as_tensor(self.norm(x))


def test_modes_are_set_without_the_models_own_train() -> None:
    model = Merging()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    with looked_at(statistics):
        pass
    model(batch())
    with looked_at(statistics):
        pass
    assert not model.merges
    assert model.training
    assert model.norm.training


class Reassigning(nn.Module):
    """Has another tensor as its buffer after every call, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        if not self.training:
            self.register_buffer("seen", x)
        return torch.as_tensor(self.norm(x))


def test_buffers_that_are_assigned_anew_are_put_back() -> None:
    model = Reassigning()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    model(batch())
    before = model.get_buffer("calls")
    with looked_at(statistics):
        assert model.get_buffer("calls") is before
    assert model.get_buffer("calls") is before
    assert float(before) == 1
    assert "seen" not in dict(model.named_buffers())


class Taking(nn.Module):
    """Takes its input out of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, given: dict[str, list[Tensor]], settings: object = None) -> Tensor:
        return torch.as_tensor(self.norm(given.pop("x").pop()))


def test_containers_that_the_model_changes_are_given_as_they_were() -> None:
    model = Taking()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    for _ in range(NUM_BATCHES):
        model({"x": [batch(mean=10.0)]})
    for _ in range(2):
        with looked_at(statistics):
            assert means(model) == pytest.approx([10.0, 10.0], rel=1e-4)


def test_batches_with_other_things_than_tensors_and_plain_values_do_not_count() -> None:
    model = Taking()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    for _ in range(NUM_BATCHES):
        model({"x": [batch(mean=10.0)]}, settings=object())
    before = means(model)
    with looked_at(statistics):
        assert means(model) == before


class Failing(nn.Module):
    """Cannot be evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(x)
        if not self.training:
            raise KeyError("labels")
        return torch.as_tensor(out)


def test_a_model_that_fails_counts_nothing_says_so_once_and_keeps_nobody_waiting() -> None:
    model = Failing()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    model(batch(mean=10.0))
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="KeyError: 'labels'"), looked_at(statistics, others(10, 2.0, norms=1)):
        assert means(model) == [2.0, 2.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with looked_at(statistics):
            assert torch.equal(model.norm.get_buffer("running_mean"), before["norm.running_mean"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model.norm.momentum == 0.1


class Halves(nn.Module):
    """Notes the type that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.types.append(out.dtype)
        return torch.as_tensor(self.norm(out))


def test_batches_are_given_under_the_autocast_that_they_came_under() -> None:
    model = Halves()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch())
    model(batch())
    with looked_at(statistics):
        pass
    with torch.autocast("cpu", dtype=torch.bfloat16), looked_at(statistics):
        pass
    assert model.types == [torch.bfloat16, torch.float32] * 3


@pytest.mark.gpu
def test_norms_may_be_on_several_devices() -> None:
    model = PerTask()
    model.tasks["b"].cuda()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    with looked_at(statistics, others(10, 2.0, norms=3)):
        assert means(model, "tasks.a") == means(model, "tasks.b") == [2.0, 2.0]
        assert model.get_buffer("tasks.b.running_mean").is_cuda
