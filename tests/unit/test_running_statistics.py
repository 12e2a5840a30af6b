"""Statistics of batch norm of a model that is the mean of several are its own, and not the mean of theirs."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco:fragments=2:alpha=0.5", "async-diloco:quorum=3"])
def test_a_mean_of_models_is_evaluated_and_saved_with_statistics_of_its_own(strategy: str, tmp_path: Path) -> None:
    name, *options = strategy.split(":")
    settings = dict(each.split("=") for each in options) | {"every": EVERY}
    script = partial(train, rate=0.2)
    result = run(script, tmp_path, name, WORKERS, cluster=cluster_of(), options=settings, max_steps=ROUNDS)
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
    """Counts its calls, takes its input by name, and has a norm of which the script may freeze statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm, self.drop = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, *, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
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
    model(x=torch.arange(10.0).view(5, 2))
    model.eval()(x=torch.full((5, 2), 100.0))
    with looked_at(statistics):
        assert model.get_buffer("norm.running_mean").tolist() == pytest.approx([4.0, 5.0], rel=1e-4)


def test_workers_count_by_their_batches() -> None:
    """Whoever has none, as one who has joined, has what the others have."""
    theirs = torch.tensor([3.0, *[6.0] * 8], dtype=torch.float64)  # of three batches: means and variances of two norms
    model = Odd()
    statistics = RunningStatistics(model, rounds=lambda: 0)
    model.frozen.eval()
    with looked_at(statistics, theirs):
        assert model.get_buffer("norm.running_mean").tolist() == [2.0, 2.0]
    model(x=torch.arange(10.0).view(5, 2))
    with looked_at(statistics, theirs):
        assert model.get_buffer("norm.running_mean").tolist() == pytest.approx([2.5, 2.75], rel=1e-4)
    with looked_at(RunningStatistics(Odd(), rounds=lambda: 0)):
        pass


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
