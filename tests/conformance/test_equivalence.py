"""Synchronous strategies equal one process with the combined batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
from tests.covering import covering, left_to

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


def virtually(scripts: Iterable[str] = SCRIPTS) -> Iterator[Any]:
    """Each script by one way among workers, and one at servers."""
    for strategy, case, is_chosen in covering(scripts, [("all-reduce", "ring"), ("ps-bsp", "ps-bsp-3")]):
        yield pytest.param(virtual_engine, case, strategy, marks=left_to(is_quick=is_chosen, is_chosen=is_chosen))


def in_processes(quick: Collection[tuple[str, str]], scripts: Iterable[str] = SCRIPTS) -> Iterator[Any]:
    """Each script by one way of bytes, and those that are `quick`."""
    for strategy, case, is_chosen in covering(scripts, [tuple(STRATEGIES)]):
        marks = left_to(is_quick=(case, strategy) in quick, is_chosen=is_chosen)
        yield pytest.param(local_engine, case, strategy, marks=marks)


# What a script means to a strategy is the same on every engine. Processes differ in how data moves.
@pytest.mark.parametrize(
    ("engine", "case", "strategy"),
    [*virtually(), *in_processes(IN_PROCESSES)],
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
    [*virtually(WITH_THREE_WORKERS), *in_processes(THREE_IN_PROCESSES, WITH_THREE_WORKERS)],
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
