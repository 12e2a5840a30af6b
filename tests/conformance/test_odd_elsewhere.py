"""The odd scripts of the other tables, under strategies whose workers differ and in clients' turns.

Each trains, or is refused in the words of its row. With one worker it is what one process does, where that worker reads
its data in the same order.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import RunFailed
from tests.conformance import (
    local_engine,
    odd_reading,
    test_odd_models,
    test_odd_replicas,
    test_odd_scripts,
    virtual_engine,
)
from tests.conformance.odd_models import Masked
from tests.conformance.reference import train_alone
from tests.conformance.scripts import EXACT, assert_close, launched, momentum, plain_step, samples, train
from tests.conformance.settings import SOON_S
from tests.covering import covering, left_to

STRATEGIES: dict[str, dict[str, Any]] = {
    "gossip": {"own_scores": False},
    "local-sgd": {"every": 3},
    "ad-psgd": {"own_scores": False},
    "fed-avg": {"clients": 2, "fraction": 1.0, "optimizer": "kept"},
}
FAMILIES = (("gossip", "ad-psgd"), ("local-sgd", "fed-avg"))
ANY = (tuple(STRATEGIES),)
QUICK = (
    "plain",
    "three ahead",
    "complex parameters, adam",
    "masks, infinities, whole numbers and truths in buffers",
    "buffers replaced",
)
IN_WORDS = (
    r"rank 1 has taken \d+ steps on \d+ batches, rank 0 \d+ on \d+: every rank must step alike.*worker\.meeting"
    r"|(rank 1 has ended after \d+ steps on \d+ batches|rank 0, in step \d+, on batch \d+: ).* leave out a batch or a "
    r"step only where all do"
)
"""What a script is told that leaves a batch out alone, or its loop."""
ALONE = {
    "own plateau": r"after (step|round) \d+ param group 0: lr is .* on rank 0 and .* on rank 1: .*worker\.meeting",
    "left out alone": IN_WORDS,
    "left out alone at the end": IN_WORDS,
    "left alone": IN_WORDS,
    "left alone with a round": IN_WORDS,
}
"""What a rank does by itself, and others are told of where they need it until the last step."""
APART = (
    "is not the same on ranks 0 and 1, as by weights that one rank has loaded after prepare; load them on every rank"
)
CHANGES_WEIGHTS = ("initialised by data", "clamped", "noise")
UNDER_NEIGHBOURS = r"step \d: the script changed parameter '.*' in place on rank \d, while neighbours mix a copy of it"
"""What scripts that change weights themselves are told where neighbours change them at any time."""
OF_CLIENTS = (
    r"rank \d: a step came when the pass over the loader had ended, and with it the client's turn; step inside the loop"
    r"|an IterableDataset cannot be divided among clients; use a map-style data set"
    r"|clients' samples are drawn from their own data, so that a sampler of the DataLoader has no meaning"
)
"""What scripts are told that read ahead, or whose data are of no client."""


def scripts() -> list[test_odd_scripts.Odd]:
    return [row for row in test_odd_scripts.ODD if row.only_on != "processes"]


def models() -> list[test_odd_models.Odd]:
    return [row for row in test_odd_models.ODD if row.only_on != "processes"]


def cases(rows: Any, families: Sequence[Sequence[str]] = FAMILIES) -> list[Any]:
    """Each row under neighbours and under rounds, of which there are two kinds each, by turns; or under one of other
    `families`."""
    return [
        pytest.param(
            strategy,
            row,
            id=f"{strategy}-{row.name}",
            marks=left_to(is_quick=row.name in QUICK, is_chosen=is_chosen),
        )
        for strategy, row, is_chosen in covering(rows, families)
    ]


def run(script: Any, strategy: str, workers: int, out: Path) -> Any:
    options = STRATEGIES[strategy]
    return virtual_engine.run(partial(launched, script), strategy=strategy, workers=workers, out=out, options=options)


def words(strategy: str, row: Any, *says: str) -> str:
    """A pattern of what the script of `row` may be told."""
    of_neighbours = [UNDER_NEIGHBOURS] if strategy == "ad-psgd" and row.name in CHANGES_WEIGHTS else []
    return "|".join([*says, *of_neighbours]) or "the script is not refused"


def state_or_refusal(script: Any, strategy: str, out: Path) -> dict[str, torch.Tensor] | str:
    """What two workers' run ends with."""
    try:
        return dict(run(script, strategy, 2, out / "two").model_state())
    except RunFailed as error:
        return str(error)


@pytest.mark.parametrize(("strategy", "row"), cases(models(), ANY))
@pytest.mark.filterwarnings("ignore:Using backward")
def test_odd_models_elsewhere(strategy: str, row: test_odd_models.Odd, tmp_path: Path) -> None:
    state = state_or_refusal(row.script, strategy, tmp_path)
    if isinstance(state, str):
        assert re.search(words(strategy, row, *filter(None, [row.says])), state)
        return
    assert all(tensor.isfinite().all() for name, tensor in state.items() if "infinite" not in name)
    if strategy != "fed-avg":
        alone = run(row.script, strategy, 1, tmp_path / "one")
        assert_close(alone.model_state(), train_alone(row.script, 1), row.tolerance or EXACT)


@pytest.mark.parametrize(("strategy", "row"), cases(test_odd_replicas.ODD))
def test_odd_replicas_elsewhere(strategy: str, row: test_odd_replicas.Odd, tmp_path: Path) -> None:
    state = state_or_refusal(row.script, strategy, tmp_path)
    if isinstance(state, str):
        says = [*row.refused.values(), IN_WORDS, APART] if row.refused else []
        assert re.search(words(strategy, row, *says), state, re.DOTALL)
        return
    assert all(tensor.isfinite().all() for tensor in state.values())
    if strategy != "fed-avg" and row.name not in test_odd_replicas.NOT_ALONE:
        alone = run(row.script, strategy, 1, tmp_path / "one")
        assert_close(alone.model_state(), train_alone(row.script, 1), EXACT)


@pytest.mark.parametrize(("strategy", "row"), cases(scripts()))
def test_odd_scripts_elsewhere(strategy: str, row: test_odd_scripts.Odd, tmp_path: Path) -> None:
    found = state_or_refusal(row.script, strategy, tmp_path)
    if isinstance(found, str):
        says = [row.refusal] * (row.samples is None) + [OF_CLIENTS] * (strategy == "fed-avg")
        assert re.search(words(strategy, row, *says), found)
        return
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.parametrize(
    "engine",
    [pytest.param(virtual_engine, id="virtual"), pytest.param(local_engine, id="processes", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("strategy", ["gossip", "local-sgd"])
def test_all_are_told_of_what_one_does_alone(strategy: str, name: str, engine: Any, tmp_path: Path) -> None:
    """At once, and not when they have waited for as long as they may."""
    row = next(row for row in test_odd_replicas.ODD if row.name == name)
    script, options = partial(launched, row.script), STRATEGIES[strategy]
    began_s = time.monotonic()
    with pytest.raises(RunFailed, match=f"(?s){ALONE[name]}"):
        engine.run(script, strategy=strategy, workers=2, out=tmp_path, options=options)
    assert time.monotonic() - began_s < SOON_S


def leaves_out_together(worker: Any) -> nn.Module:
    """As the words have it: ranks meet to decide."""

    def skips(run: test_odd_replicas.Run) -> bool:
        with worker.meeting("together"):
            return bool(worker.all_reduce(torch.tensor(test_odd_replicas.skip(run, at=5)).float(), op="max"))

    return test_odd_replicas.train(worker, skips=skips)


@pytest.mark.parametrize("strategy", ["gossip", "local-sgd"])
def test_a_batch_may_be_left_out_together(strategy: str, tmp_path: Path) -> None:
    result = run(leaves_out_together, strategy, 2, tmp_path)
    assert [step.step for step in result.steps if step.worker == 1][-1] == test_odd_replicas.NUM_STEPS - 1


def passes_in_one(batches: Any) -> Any:
    while True:
        yield from batches


def test_a_client_does_not_train_on_what_was_read_ahead_for_another(tmp_path: Path) -> None:
    def way(batches: Any) -> Any:
        return itertools.islice(odd_reading.ahead(passes_in_one(batches)), 40)

    with pytest.raises(RunFailed, match=r"rank \d: the script reads ahead, and asks for the next client's batches"):
        run(partial(odd_reading.train, way=way), "fed-avg", 2, tmp_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_that_nobody_changes_stay_as_they_are(strategy: str, tmp_path: Path) -> None:
    result = run(partial(train, model=Masked, optimizer=momentum, data=partial(samples, 24)), strategy, 2, tmp_path)
    state = result.model_state()
    for name, buffer in Masked().named_buffers():
        assert torch.equal(state[name], buffer), name


class Growing(nn.Module):
    """A buffer has another shape after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen = torch.cat([self.seen, torch.ones(1)])
        return self.net(x)


def test_clients_have_no_mean_of_buffers_of_other_shapes(tmp_path: Path) -> None:
    script = partial(train, model=Growing, optimizer=momentum, step=plain_step, data=partial(samples, 24))
    with pytest.raises(RunFailed, match=r"buffer 'seen' is of shape \[\d\] now and was prepared with \[0\].*keep"):
        run(script, "fed-avg", 2, tmp_path)
