"""What virtual workers promise others about when they exchange something: who keeps it, who is late, and who need not
say it."""

from __future__ import annotations

import contextlib
import itertools
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim import SGD

from paceline.cluster.description import Cluster
from paceline.engines.virtual.promise import Promise
from paceline.engines.virtual.spread.crew import Crew
from paceline.training.worker import Worker
from tests.conformance.rows import Row, every_row, loader_of, prepared, problem, step, train
from tests.conformance.test_spread import NUM_WORKERS, TIED, UNEVEN, AveragedFeatures, content, deep, require_same
from tests.conformance.test_virtual import train_with_noise
from tests.conformance.virtual_cluster import STEP_S, run


def exchange_in_forward_later(worker: Worker, out: Path) -> None:
    """By then others count on it that it does not."""
    model = AveragedFeatures(worker)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for number, (x, y, _) in enumerate(loader):
        model.forward = types.MethodType(  # type: ignore[method-assign]
            AveragedFeatures.forward if number > 3 else lambda self, x: self.last(self.first(x)), model
        )
        step(worker, model, optimizer, x, y)


def break_with_a_batch_in_hand(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for _ in range(3):
        for number, (x, y, _) in enumerate(loader):
            if number == 3:
                break
            step(worker, model, optimizer, x, y)
        worker.log(others=worker.all_gather(torch.tensor(worker.rank))[0].float())


def train_in_pieces_later(worker: Worker, out: Path) -> None:
    """Pieces of a batch take less time than the whole."""
    model, optimizer, loader = prepared(worker)
    for step_number, (x, y, _) in enumerate(loader):
        if step_number > 3:
            x, y = x[:2], y[:2]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_in_pieces(worker: Worker, out: Path) -> None:
    """Two of each batch, the first without an exchange."""
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        for number in range(2):
            with worker.no_sync() if number == 0 else contextlib.nullcontext():
                F.cross_entropy(model(x[number::2]), y[number::2]).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_pairs(worker: Worker, out: Path) -> None:
    """Two forward passes, one backward pass, and a look at the model in between."""
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        with torch.no_grad():
            model(x)
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x * 0.5), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sleep_at_times(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader):
        time.sleep(STEP_S * (number % 3))
        step(worker, model, optimizer, x, y)


def count_samples_first(worker: Worker, out: Path) -> None:
    """Each step exchanges something before it computes."""
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        worker.all_reduce(torch.tensor(float(len(x))))
        step(worker, model, optimizer, x, y)


def look_at_everything(worker: Worker, out: Path) -> None:
    """Now and then at many samples, with gradients that nobody takes."""
    model, optimizer, loader = prepared(worker)
    everything, labels, _ = problem().tensors
    for number, (x, y, _) in enumerate(loader):
        step(worker, model, optimizer, x, y)
        if number % 2:
            worker.all_reduce(F.cross_entropy(model(everything), labels).detach())


def accumulate(worker: Worker, out: Path) -> None:
    """Two passes before each step, both of which exchange their gradients; and a word after it."""
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            worker.log(others=worker.all_gather(torch.tensor(worker.rank))[0].float())


def train_twice_on_each_batch(worker: Worker, out: Path) -> None:
    """The second time on half of it."""
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)
        step(worker, model, optimizer, x[: len(x) // 2], y[: len(y) // 2])


def talk_after_epochs(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for _ in range(3):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)
        worker.log(others=worker.all_gather(torch.tensor(worker.rank))[0].float())


def talk_at_times(worker: Worker, out: Path) -> None:
    """Between two steps, and not between the others."""
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader):
        step(worker, model, optimizer, x, y)
        if number in (3, 5):
            worker.log(others=worker.all_gather(torch.tensor(worker.rank))[0].float())


SCRIPTS = [
    talk_at_times,
    talk_after_epochs,
    accumulate,
    train_twice_on_each_batch,
    count_samples_first,
    look_at_everything,
    exchange_in_forward_later,
    break_with_a_batch_in_hand,
    train_in_pieces_later,
    train_in_pieces,
    train_pairs,
    sleep_at_times,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("cluster", [UNEVEN, TIED], ids=["uneven", "tied"])
def test_nor_for_when_in_a_step_something_is_exchanged(script: Any, cluster: Cluster, tmp_path: Path) -> None:
    require_same(script, tmp_path, "all-reduce", 3, cluster=cluster)


@pytest.mark.parametrize("strategy", ["ps-asp", "ps-bsp"])
def test_nor_under_servers(strategy: str, tmp_path: Path) -> None:
    require_same(train_in_pieces_later, tmp_path, strategy, 3, cluster=UNEVEN)


@pytest.mark.parametrize(
    "script",
    [
        train_in_pieces,
        train_pairs,
        sleep_at_times,
        deep,
        count_samples_first,
        look_at_everything,
        accumulate,
        train_twice_on_each_batch,
        talk_after_epochs,
    ],
    ids=lambda script: script.__name__,
)
def test_who_does_the_same_in_each_step_is_never_late(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_never_late(script, tmp_path, monkeypatch, "all-reduce", 3, cluster=UNEVEN)


@every_row
@pytest.mark.parametrize("cluster", [UNEVEN, TIED], ids=["uneven", "tied"])
def test_nor_is_anyone_for_pauses(row: Row, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = max(row.workers, NUM_WORKERS) if row.workers > 1 else 1
    require_never_late(
        train_with_noise,
        tmp_path,
        monkeypatch,
        row.strategy,
        workers,
        options=row.options,
        cluster=cluster,
        eval_every=4,
        seed=3,
    )


def require_never_late(
    script: Any, out: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, workers: int, **settings: Any
) -> None:
    """Times are as if nothing had been promised."""
    run(script, out / "promises", strategy, workers, **settings)
    monkeypatch.setattr(Promise, "begin", lambda self, now_s, step_s: None)
    run(script, out / "none", strategy, workers, **settings)
    assert content(out / "promises" / "run") == content(out / "none" / "run")


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
def test_workers_say_that_they_compute_only_where_it_is_not_known(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their second and third step, and in those that begin an epoch."""
    heard: list[tuple[int, bool]] = []
    note = Crew._note

    def counted(self: Crew, rank: int, *, is_busy: bool) -> None:
        heard.append((rank, is_busy))
        note(self, rank, is_busy=is_busy)

    monkeypatch.setattr(Crew, "_note", counted)
    num_epochs = 4
    run(partial(train, num_epochs=num_epochs), tmp_path, strategy, 4, cluster=UNEVEN, num_processes=2)
    for rank in range(4):
        assert heard.count((rank, True)) == 2 + (num_epochs - 1)


@pytest.mark.parametrize(("script", "late_step"), [(break_with_a_batch_in_hand, 4), (talk_at_times, 5)])
def test_who_exchanges_earlier_than_usual_is_late_once(script: Any, late_step: int, tmp_path: Path) -> None:
    """A batch in hand counts as computed, or the one that is asked for next, the first time."""
    result = run(script, tmp_path, "all-reduce", 2, cluster=TIED)
    ends_s = [0.0, *(step.time_s for step in result.steps if step.worker == 0)]
    steps_s = [later - earlier for earlier, later in itertools.pairwise(ends_s)]
    expected = [STEP_S] * len(steps_s)
    expected[late_step - 1] = 2 * STEP_S
    assert steps_s == pytest.approx(expected, rel=0.01)
