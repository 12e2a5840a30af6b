"""Pauses come by time: replicas that drift are noticed soon, and a killed run loses little."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import paceline
from paceline.errors import RunFailed, UsageError
from paceline.running.result import Result
from paceline.training import agreement, checkpoints
from tests.conformance import local_engine, virtual_engine
from tests.conformance.scripts import launched, loader_of, momentum, perceptron, plain_step, samples

EVERY_STRATEGY = ("all-reduce", "ps-bsp", "ps-ssp", "ps-asp")


def train(worker: Any, *, num_epochs: int = 20, changed_at: int | None = None, factor: float = 1.1) -> nn.Module:
    """Rank 1 scales its own copy of a weight once, in a way that torch does not count."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    number = 0
    for _ in range(num_epochs):
        for batch in loader:
            plain_step(model, optimizer, batch)
            number += 1
            if number == changed_at and worker.rank == 1:
                model[3].weight.data.mul_(factor)
    return model


def run(
    out: Path,
    *,
    engine: Any = virtual_engine,
    strategy: str = "all-reduce",
    workers: int = 2,
    settings: Any = None,
    **changes: Any,
) -> Result:
    script = partial(launched, partial(train, **changes))
    result: Result = engine.run(script, strategy=strategy, workers=workers, out=out, **(settings or {}))
    return result


@pytest.mark.parametrize("strategy", [*EVERY_STRATEGY, "single"])
def test_a_run_without_evaluations_is_saved_in_time(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "INTERVAL_S", 0.03)
    workers = 1 if strategy == "single" else 2
    result = run(tmp_path, strategy=strategy, workers=workers, num_epochs=24)
    saved_s = [event.time_s for event in result.events if event.name == "checkpoint"]
    assert max(later - earlier for earlier, later in pairwise([0.0, *saved_s])) <= 0.03
    assert len(saved_s) >= result.training_time_s / 0.03 > 7


def test_checkpoints_by_iterations_alone_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "INTERVAL_S", 0.01)
    result = run(tmp_path, settings={"checkpoint_every": 50}, num_epochs=10)
    assert [event.iteration for event in result.events if event.name == "checkpoint"] == [50, 100, 120]


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each digest of a whole model was made of."""
    seen: list[int] = []
    monkeypatch.setattr(agreement, "digest", lambda tensors: str(seen.append(1)))
    return seen


def test_models_are_compared_soon_and_then_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After iterations 0, 1, 3, 7, 15 and so on, and at the end, on each of two workers."""
    seen = looks(monkeypatch)
    run(tmp_path, num_epochs=5, settings={"max_steps": 60})
    assert len(seen) == 2 * len([0, 1, 3, 7, 15, 31, 60])


def test_strict_runs_compare_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = looks(monkeypatch)
    run(tmp_path, num_epochs=5, settings={"max_steps": 40, "strict": True})
    assert len(seen) >= 2 * 41


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
@pytest.mark.parametrize(
    ("engine", "strict", "found_after"),
    [
        (virtual_engine, True, 40),
        (virtual_engine, False, 63),
        pytest.param(local_engine, True, 40, marks=pytest.mark.slow),
    ],
)
def test_drift_is_named(engine: Any, strategy: str, strict: bool, found_after: int, tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed, match=rf"after step {found_after} parameter '3.weight' .* on rank 1 it is up to 0\.\d+"
    ):
        run(
            tmp_path,
            engine=engine,
            strategy=strategy,
            changed_at=40 if strategy == "all-reduce" or strict else 63,
            settings={"strict": strict},
        )


def test_rounding_is_told_once(tmp_path: Path) -> None:
    result = run(tmp_path, changed_at=5, factor=1 + 1e-13)
    told = [event for event in result.events if event.name == "differs_by_rounding"]
    assert [event.details["parameter"] for event in told] == ["3.weight"]
    assert 0 < told[0].details["difference"] < 1e-12


def test_strict_has_no_effect_where_workers_differ_by_design(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--strict has no effect under ps-asp"):
        paceline.run(train, strategy="ps-asp", workers=2, strict=True, out=tmp_path)
    with pytest.raises(UsageError, match="--strict has no effect with one worker"):
        paceline.run(train, strict=True, out=tmp_path)
