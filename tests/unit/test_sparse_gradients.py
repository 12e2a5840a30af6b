"""Gradients of few rows: their mean over workers, and which rows a worker lacks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.server.tables.changes import ChangedKeys
from paceline.strategies.by_rows import moved_by_rows
from paceline.strategies.replica import describe
from paceline.strategies.sparse_gradients import SparseGradients, rows_of
from tests.unit.one_table import BATCHES, DIM, NUM_ROWS, Net, gradients_of, spec_of


class Meeting:
    """Ranks in threads, which gather and sum."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def all(self, rank: int, given: Any) -> list[Any]:
        self._given[rank] = given
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class Rank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.size, self._meeting, self._rank = meeting.size, meeting, rank

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._meeting.all(self._rank, tensor.clone())

    def all_reduce(self, tensor: Tensor, *, op: str) -> Rank:
        assert op == "mean"
        tensor.copy_(sum(self._meeting.all(self._rank, tensor.clone())) / self.size)  # type: ignore[arg-type]
        return self

    def wait(self) -> None:
        pass


def averaged(models: Sequence[nn.Module], weights: Sequence[float]) -> None:
    meeting = Meeting(len(models))

    def average(rank: int) -> None:
        replica = describe(models[rank], torch.optim.SGD(models[rank].parameters(), lr=0.1))
        rows = SparseGradients(replace(replica, by_rows=moved_by_rows(replica)))
        rows.average(Rank(meeting, rank), weight=weights[rank])  # type: ignore[arg-type]

    threads = [threading.Thread(target=average, args=(rank,)) for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def tables() -> nn.Module:
    return nn.ModuleList([nn.Embedding(NUM_ROWS, DIM, sparse=True), nn.EmbeddingBag(5, 1, sparse=True)]).double()


KEYS = st.lists(st.integers(0, NUM_ROWS - 1), max_size=8)
WORKERS = st.lists(st.tuples(KEYS, st.booleans(), st.sampled_from([0.5, 1.0, 1.5])), min_size=1, max_size=3)


@given(workers=WORKERS)
@settings(max_examples=40, deadline=None)
def test_the_mean_is_that_of_whole_gradients(workers: list[tuple[list[int], bool, float]]) -> None:
    """Keys that come twice, workers without any, and one that uses a table in another way, too."""
    models: list[Any] = [tables() for _ in workers]
    wholes = []
    for model, (keys, is_dense, _) in zip(models, workers, strict=True):
        loss = model[0](torch.tensor(keys, dtype=torch.int64)).square().sum() if keys else None
        loss = loss if not is_dense else (0 if loss is None else loss) + model[0].weight.sum()
        if loss is not None:
            loss.backward()
        gradient = model[0].weight.grad
        wholes.append(torch.zeros(NUM_ROWS, DIM).double() if gradient is None else gradient.to_dense().clone())
    averaged(models, [weight for *_, weight in workers])
    pairs = zip(wholes, workers, strict=True)
    mean = sum(whole * weight for whole, (*_, weight) in pairs) / len(workers)
    for model in models:
        found = model[0].weight.grad
        if any(keys or is_dense for keys, is_dense, _ in workers):
            assert found.is_sparse != any(is_dense for _, is_dense, _ in workers)
            torch.testing.assert_close(found.to_dense(), mean)
        else:
            assert found is None
        assert model[1].weight.grad is None


@given(batches=BATCHES, num_servers=st.integers(1, 4), asks=st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_worker_that_takes_what_has_changed_has_the_whole_table(
    batches: list[list[int]], num_servers: int, asks: list[bool]
) -> None:
    """Whenever it asks, of two that ask at other times."""
    net = Net(spec_of(), num_servers=num_servers, num_workers=2)
    copies = [net.read(range(NUM_ROWS)) for _ in range(2)]
    for worker in (0, 1):
        assert not len(net.changed(worker).keys)
    for number, (keys, is_asked) in enumerate(zip(batches, asks, strict=False)):
        gradients = gradients_of(keys, seed=number)
        net.update({number % 2: (1.0, gradients if keys else None)})
        for worker in [0] * is_asked + [1]:
            seen, changes = net.changed(worker, looks=True), net.changed(worker)
            assert all(map(torch.equal, seen, changes))
            copies[worker][changes.keys] = changes.rows
            assert torch.equal(copies[worker], net.read(range(NUM_ROWS)))
            assert worker == 0 or sorted(changes.keys.tolist()) == sorted(set(keys))


def test_what_a_worker_lacks_is_bounded() -> None:
    """A worker that asks no more costs no more than all keys, and those that have come lately."""
    changed = ChangedKeys(lambda: torch.arange(2100))
    changed.take(0)
    for start in range(100):
        changed.add(torch.arange(start, start + 2000))
    (lacking,) = changed._lacking.values()
    assert len(lacking.known) + sum(map(len, lacking.new)) < 2**16 + 4000
    assert changed.take(0).tolist() == list(range(2099))
    assert not len(changed.take(0))


def test_what_a_worker_lacks_is_forgotten_when_it_leaves() -> None:
    """It may ask again, and lacks all rows then."""
    changed = ChangedKeys(lambda: torch.arange(50))
    for worker in (0, 1):
        changed.take(worker)
    changed.leave(0)
    changed.add(torch.arange(20))
    assert list(changed._lacking) == [1]
    assert changed.take(0).tolist() == list(range(50))
    assert not len(changed.take(0))
    assert changed.take(1).tolist() == list(range(20))
    changed.leave(2)  # which has never asked
    assert not len(changed.take(2))


def test_gradients_that_nobody_exchanges_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the gradient of 'words' is torch\.sparse_csr"):
        rows_of(torch.eye(3).to_sparse_csr(), name="words")
    with pytest.raises(UsageError, match="has a history"):
        rows_of(torch.ones(2, 2, requires_grad=True), name="words")
