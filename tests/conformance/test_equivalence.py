"""Synchronous strategies equal one process with the combined batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RunFailed
from tests.conformance import local_engine, virtual_engine
from tests.conformance.reference import train_alone
from tests.conformance.scripts import (
    BATCH_SIZE,
    EXACT,
    FOR_EVERY_STRATEGY,
    NUM_EPOCHS,
    NUM_SAMPLES,
    SCRIPTS,
    WITH_THREE_WORKERS,
    Branches,
    assert_close,
    branch_step,
    launched,
    momentum,
    train,
)

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "all-reduce": ("all-reduce", {"bucket_mb": 0.002}),
    "ring": ("ring", {}),
    "ps-bsp": ("ps-bsp", {}),
    "ps-bsp-3": ("ps-bsp", {"servers": 3}),
}
IN_PROCESSES = {
    *((case, strategy) for case in FOR_EVERY_STRATEGY for strategy in ("all-reduce", "ps-bsp-3")),
    ("clip by norm, uneven tail", "ring"),
    ("clip by norm, uneven tail", "ps-bsp"),
}
THREE_IN_PROCESSES = {("momentum", "all-reduce"), ("clip by norm, uneven tail", "ps-bsp-3"), ("uneven tail", "ring")}
PARAMETER_SERVERS = [name for name in STRATEGIES if name.startswith("ps")]


def every_script_under_every_strategy(
    engine: Any, quick: Collection[tuple[str, str]] | None = None, *, cases: Iterable[str] = SCRIPTS
) -> list[Any]:
    """If `quick` names some, the others are left to `make test-slow`, and each script has two strategies of them, among
    workers and at servers, and the next script the other two."""
    found = []
    for number, case in enumerate(cases):
        for place, strategy in enumerate(STRATEGIES):
            if quick is None or (case, strategy) in quick:
                found.append(pytest.param(engine, case, strategy))
            elif number % 2 == place % 2:
                found.append(pytest.param(engine, case, strategy, marks=pytest.mark.slow))
    return found


# What a script means to a strategy is the same on every engine. Processes differ in how data moves.
@pytest.mark.parametrize(
    ("engine", "case", "strategy"),
    [
        *every_script_under_every_strategy(virtual_engine),
        *every_script_under_every_strategy(local_engine, IN_PROCESSES),
    ],
)
def test_two_workers_equal_one_process(engine: Any, case: str, strategy: str, tmp_path: Path) -> None:
    script, tolerance = SCRIPTS[case]
    name, options = STRATEGIES[strategy]
    result = engine.run(partial(launched, script), strategy=name, options=options, workers=2, out=tmp_path)
    expected = train_alone(script, 2)
    assert result.iteration >= NUM_SAMPLES // (2 * BATCH_SIZE) // 3 * NUM_EPOCHS
    assert_close(result.model_state(), expected, tolerance)


@pytest.mark.parametrize(
    ("engine", "case", "strategy"),
    [
        *every_script_under_every_strategy(virtual_engine, cases=WITH_THREE_WORKERS),
        *every_script_under_every_strategy(local_engine, THREE_IN_PROCESSES, cases=WITH_THREE_WORKERS),
    ],
)
def test_three_workers_equal_one_process(engine: Any, case: str, strategy: str, tmp_path: Path) -> None:
    script, tolerance = SCRIPTS[case]
    name, options = STRATEGIES[strategy]
    result = engine.run(partial(launched, script), strategy=name, options=options, workers=3, out=tmp_path)
    assert_close(result.model_state(), train_alone(script, 3), tolerance)


@pytest.mark.parametrize("case", ["momentum", "clip by norm, uneven tail", "two groups", "mixed dtypes"])
def test_servers_on_another_host_equal_one_process(case: str, tmp_path: Path) -> None:
    script, tolerance = SCRIPTS[case]
    program = partial(launched, script)
    result = local_engine.run(
        program, strategy="ps-bsp", options={"servers": 2}, workers=2, out=tmp_path, servers_are_local=False
    )
    assert_close(result.model_state(), train_alone(script, 2), tolerance)


@pytest.mark.parametrize("strategy", ["all-reduce", "ring"])
def test_parameters_unused_in_some_steps(strategy: str, tmp_path: Path) -> None:
    """On one worker, on all, or for ever: weight decay and momentum leave an unused parameter alone."""
    script = partial(train, optimizer=partial(momentum, weight_decay=0.1), model=Branches, step=branch_step)
    name, options = STRATEGIES[strategy]
    result = local_engine.run(partial(launched, script), strategy=name, options=options, workers=2, out=tmp_path)
    assert_close(result.model_state(), train_alone(script, 2), EXACT)


@pytest.mark.parametrize("strategy", PARAMETER_SERVERS)
def test_servers_refuse_unused_parameters(strategy: str, tmp_path: Path) -> None:
    script = partial(train, optimizer=momentum, model=Branches, step=branch_step)
    name, options = STRATEGIES[strategy]
    with pytest.raises(RunFailed, match=r"parameter '(odd|never)\.weight' has no gradient.*requires_grad_\(False\)"):
        local_engine.run(partial(launched, script), strategy=name, options=options, workers=2, out=tmp_path)
