"""Loops over what is not torch's: their steps are recorded, and budgets and interrupts end them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.engines.ray.interrupts import Interrupted
from paceline.engines.standing import Progress
from paceline.errors import RunFailed
from tests.conformance import local_engine, virtual_engine
from tests.conformance.local_engine import STOP_FILE
from tests.conformance.odd_judging import ENGINES
from tests.conformance.rows import prepared

WORKERS, STEPS = 3, 8


def loop(out: Path, *, stops_at: int | None = None) -> None:
    """Each worker's gradient is its rank: the mean is 1."""
    worker = paceline.init()
    weights = worker.broadcast_tree({"w": np.zeros(2)})
    num_steps = 0
    for _ in range(2):
        for _ in range(STEPS // 2):
            if not worker.begin_step(4 + worker.rank):
                break
            if num_steps == stops_at and worker.rank == 1:
                (out / STOP_FILE).touch()
            weights["w"] += worker.all_reduce_tree({"w": np.full(2, float(worker.rank))})["w"]
            num_steps += 1
    assert worker.is_over == (num_steps < STEPS)
    np.save(out / f"{worker.rank}.npy", weights["w"])


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(("max_steps", "wanted"), [(None, STEPS), (5, 5), (100, STEPS)])
def test_steps_are_recorded_and_a_budget_ends_them(
    engine: Any, max_steps: int | None, wanted: int, tmp_path: Path
) -> None:
    result = engine.run(
        partial(loop, tmp_path), strategy="all-reduce", workers=WORKERS, out=tmp_path, max_steps=max_steps
    )
    for rank in range(WORKERS):
        own = [record for record in result.steps if record.worker == rank]
        assert [(record.step, record.iteration) for record in own] == [(n, n) for n in range(1, wanted + 1)]
        assert {record.samples for record in own} == {4 + rank}
        assert [record.time_s for record in own] == sorted(record.time_s for record in own)
        assert all(record.compute_s >= 0 and record.communication_s >= 0 for record in own)
        assert np.load(tmp_path / f"{rank}.npy").tolist() == [wanted] * 2
    assert result.iteration == wanted


def test_an_interrupt_ends_all_workers_at_one_step(tmp_path: Path) -> None:
    program = partial(loop, tmp_path, stops_at=2)
    result = local_engine.run(program, strategy="all-reduce", workers=WORKERS, out=tmp_path)
    assert result.iteration < STEPS
    assert {np.load(tmp_path / f"{rank}.npy")[0] for rank in range(WORKERS)} == {result.iteration}
    progress = Progress()
    progress.take(result.events)
    said = str(Interrupted(tmp_path, how=progress.how_to_go_on))
    assert said.startswith("interrupted; this script saves by itself: run it again with another --out"), said


NUMBERS = 100_000  # that take their time on a simulated network
EXCHANGES: dict[str, Callable[[paceline.Worker], object]] = {
    "none": lambda _: None,
    "barrier": lambda worker: worker.barrier(),
    "all_reduce": lambda worker: worker.all_reduce(torch.ones(NUMBERS)),
    "broadcast": lambda worker: worker.broadcast(torch.ones(NUMBERS), root=1),
    "all_reduce_tree": lambda worker: worker.all_reduce_tree([torch.ones(NUMBERS)]),
    "broadcast_tree": lambda worker: worker.broadcast_tree([torch.ones(NUMBERS)], root=1),
    "all_gather": lambda worker: worker.all_gather(torch.ones(NUMBERS)),
    "gather": lambda worker: worker.gather(torch.ones(NUMBERS)),
    "scatter": lambda worker: worker.scatter([torch.ones(NUMBERS)] * 2 if worker.rank else None, root=1),
    "reduce_scatter": lambda worker: worker.reduce_scatter([torch.ones(NUMBERS)] * 2),
    "all_to_all": lambda worker: worker.all_to_all([torch.ones(NUMBERS)] * 2),
    "send and recv": lambda worker: (
        worker.send(torch.ones(NUMBERS), destination=0) if worker.rank else worker.recv(torch.ones(NUMBERS), source=1)
    ),
    "all_gather_object": lambda worker: worker.all_gather_object(1),
    "broadcast_object": lambda worker: worker.broadcast_object(1, root=1),
}


def exchanging() -> None:
    worker = paceline.init()
    for exchange in EXCHANGES.values():
        worker.begin_step(1)
        exchange(worker)
    worker.begin_step(1)


def test_each_exchange_counts_as_one(tmp_path: Path) -> None:
    """By the simulated network's clock, which no other process changes."""
    result = virtual_engine.run(exchanging, strategy="all-reduce", workers=2, out=tmp_path)
    own = [record.communication_s for record in result.steps if record.worker == 0]
    took_s = dict(zip(EXCHANGES, own, strict=False))
    assert [name for name in took_s if took_s[name] <= 1.2 * took_s["none"]] == ["none"], took_s


def apart(out: Path) -> None:
    """Between `end_step` and the next step nothing is training."""
    worker = paceline.init()
    for _ in range(3):
        worker.begin_step(1)
        worker.end_step()
        time.sleep(0.1)
    assert worker.begin_step(1) is False
    worker.end_step()


def test_what_lies_between_two_steps_is_no_training(tmp_path: Path) -> None:
    result = local_engine.run(partial(apart, tmp_path), strategy="all-reduce", workers=2, out=tmp_path, max_steps=3)
    for rank in range(2):
        own = [record for record in result.steps if record.worker == rank]
        assert len(own) == 3
        assert own[-1].time_s == pytest.approx(sum(each.compute_s + each.communication_s for each in own), abs=1e-5)


def of_so_many(samples: Any) -> None:
    paceline.init().begin_step(samples)


def after_prepare() -> None:
    worker = paceline.init()
    prepared(worker)
    worker.begin_step(1)


@pytest.mark.parametrize(
    ("program", "settings", "said"),
    [
        (partial(loop, Path()), {"target": "accuracy=0.9"}, "--target needs a model that worker.prepare was given"),
        (partial(loop, Path()), {"checkpoint_every": 2}, "--checkpoint-every needs a model"),
        (partial(loop, Path()), {"copy_checkpoints": "memory://copies-of-a-loop"}, "--copy-checkpoints needs a model"),
        (after_prepare, {}, "for loops without worker.prepare"),
        (partial(of_so_many, 2.5), {}, r"begin_step\(2.5\): samples must be a whole number"),
        (partial(of_so_many, -3), {}, r"begin_step\(-3\): samples must be a whole number"),
    ],
)
def test_what_cannot_be_had_is_refused(
    program: Callable[[], None], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match=said):
        virtual_engine.run(program, strategy="all-reduce", workers=2, out=tmp_path, **settings)
