"""Rounds of local steps over servers of which a quorum is enough, on simulated clusters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.errors import RunFailed, UsageError
from paceline.running.result import Result
from paceline.strategies import build
from tests.conformance import virtual_engine
from tests.conformance.rows import SELDOM

EVERY, RATE = 4, 0.5
ALIKE: dict[str, Any] = {"bandwidth_gbit_per_s": 1.0, "latency_us": 100.0}


def cluster(workers: int, *, slowness: float = 1.0) -> Cluster:
    """Hosts for a worker each, of which the last is so much slower, and for two servers."""
    hosts = (
        Hosts(count=workers - 1, **ALIKE),
        Hosts(name="slow", speed=1 / slowness, **ALIKE),
        Hosts(name="servers", count=2, workers=0, **ALIKE),
    )
    return Cluster(hosts=hosts, compute=Compute(step_s=0.1))


def descend(*, batches: int, num_parameters: int = 1) -> None:
    """Each step takes the rate off every parameter, whatever the sample."""
    worker = paceline.init()
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(1, num_parameters, bias=False)
        nn.init.zeros_(model.weight)
        loader = DataLoader(TensorDataset(torch.ones(batches * worker.size, 1)), batch_size=1)
        model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=RATE), loader)
        worker.evaluation(lambda model: {"weight": float(model.weight.min())})
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum(1).mean().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)


def run(out: Path, *, workers: int = 4, slowness: float = 1.0, batches: int = 40, **options: Any) -> Result:
    size = options.pop("num_parameters", 1)
    settings = {name: options.pop(name) for name in ("eval_every",) if name in options}
    return virtual_engine.run(
        partial(descend, batches=batches, num_parameters=size),
        strategy="async-diloco",
        workers=workers,
        options={"every": EVERY, "outer": "average", **options},
        out=out,
        cluster=cluster(workers, slowness=slowness),
        checkpoint_every=SELDOM,
        **settings,
    )


@pytest.mark.parametrize(("quorum", "servers", "num_parameters"), [(1, 1, 1), (2, 2, 20), (3, 1, 300_000)])
def test_every_change_counts_once(quorum: int, servers: int, num_parameters: int, tmp_path: Path) -> None:
    """All changes are alike, and so is any mean of them: what is left is how many rounds there were. Those of 2.4 MB
    are held by three shards, which have to agree on each round."""
    found = run(tmp_path, slowness=3.0, quorum=quorum, servers=servers, num_parameters=num_parameters)
    first = [update for update in found.updates if update.server == 0]
    assert len(first) == 4 * 40 // EVERY
    rounds = {update.iteration for update in first}
    assert rounds == set(range(1, found.iteration + 1))
    for tensor in found.model_state().values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, -RATE * EVERY * len(rounds)), rtol=1e-12, atol=0)
    sizes = [sum(update.iteration == number for update in first) for number in rounds]
    assert min(sizes[:8]) >= quorum, "until the fast ones are through"


def test_fast_workers_do_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    """Three of four are through in the time that they compute, in which the slow one has computed a third."""
    found = run(tmp_path / "quorum", slowness=3.0, quorum=3)
    ends_s = [max(step.time_s for step in found.steps if step.worker == rank) for rank in range(4)]
    assert max(ends_s[:3]) < 1.2 * 40 * 0.1
    assert ends_s[3] > 40 * 0.3
    late = [update for update in found.updates if update.worker == 3]
    assert max(update.staleness for update in late) >= 2
    everybody = run(tmp_path / "everybody", slowness=3.0, quorum=4)
    assert everybody.iteration == 40 // EVERY
    assert all(update.staleness == 0 for update in everybody.updates)
    assert everybody.training_time_s >= 40 * 0.3


def test_grace_takes_in_who_comes_soon_after(tmp_path: Path) -> None:
    """A slow worker that needs a quarter more than the others comes 0.1 s after them."""
    without = run(tmp_path / "without", slowness=1.25, quorum=3)
    with_grace = run(tmp_path / "with", slowness=1.25, quorum=3, grace_s=0.15)
    assert any(update.staleness > 0 for update in without.updates)
    assert all(update.staleness == 0 for update in with_grace.updates)
    assert with_grace.iteration == 40 // EVERY < without.iteration


def test_all_meet_where_a_pause_is_due(tmp_path: Path) -> None:
    """The round before it is of everybody, so that nothing is under way in it."""
    found = run(tmp_path, slowness=3.0, quorum=2, eval_every=5)
    judged = [each.iteration for each in found.evaluations]
    assert judged[:3] == [0, 5, 10]
    for evaluation in found.evaluations:
        assert evaluation.metrics["weight"] == -RATE * EVERY * evaluation.iteration
    assert {update.worker for update in found.updates if update.iteration == 5} == {0, 1, 2, 3}


def test_quorum_of_all_is_diloco(tmp_path: Path) -> None:
    """The outer optimizer is on servers: the same steps, to rounding."""
    models = []
    for strategy, options in (("async-diloco", {"quorum": 3, "servers": 2}), ("diloco", {})):
        result = virtual_engine.run(
            partial(descend, batches=22, num_parameters=20),
            strategy=strategy,
            workers=3,
            options={"every": EVERY, **options},
            out=tmp_path / strategy,
            cluster=cluster(3),
        )
        models.append(result.model_state())
    torch.testing.assert_close(models[0], models[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("codec", "part"), [("int8", 0.17), ("one-bit", 0.06)])
def test_what_a_codec_leaves_out_of_a_change_comes_later(codec: str, part: float, tmp_path: Path) -> None:
    """All changes are alike, so that these codecs keep each parameter's where it is, with far fewer bytes."""
    options = {"quorum": 2, "servers": 2, "num_parameters": 2000, "codec_scope": "all"}
    plain, found = (
        run(tmp_path / "plain", **options | {"codec_scope": "links"}),
        run(tmp_path / "coded", codec=codec, **options),
    )
    assert found.iteration == plain.iteration
    (moved,), (expected,) = found.model_state().values(), plain.model_state().values()
    torch.testing.assert_close(moved, expected, rtol=0.02, atol=0.0)
    moved_bytes = [sum(step.moved_bytes for step in result.steps) for result in (plain, found)]
    pushed_bytes = moved_bytes[0] / 2  # as much comes back, as it is
    assert moved_bytes[1] - pushed_bytes < part * pushed_bytes
    (event,) = [event for event in found.events if event.name == "tuned"]
    assert codec in str(event.details)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "powersgd"}, "workers push to servers one by one"),
        ({"codec": "sign"}, "the outer step needs both"),
        ({"codec": "auto"}, "servers are told at the start"),
        ({"codec_scope": "all"}, "has no effect without a codec"),
        ({"quorum": 5}, "quorum=5 is more than 2"),
        ({"quorum": 0}, "quorum must be at least 1"),
        ({"quorum": 2, "grace_s": 1.0}, "grace_s has no effect"),
        ({"grace_s": -1.0}, "grace_s must be a number from 0"),
        ({"outer": "fed-adam"}, "none of torch's optimizers"),
        ({"outer": "nesterov", "outer.momentum": 0.0}, "outer="),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build("async-diloco", options).check(num_workers=2)


def test_it_needs_servers() -> None:
    assert build("async-diloco", {"servers": 3}).traits.num_servers == 3


def overflow() -> None:
    worker = paceline.init()
    model = nn.Linear(1, 1, bias=False)
    loader = DataLoader(TensorDataset(torch.ones(8 * worker.size, 1)), batch_size=1)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1.0), loader)
    for number, (x,) in enumerate(loader, start=1):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if worker.rank == 1 and number == 2:
            with torch.no_grad():
                model.weight.fill_(torch.inf)


def test_change_that_is_not_finite_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="rank 1"):
        virtual_engine.run(
            overflow, strategy="async-diloco", workers=2, options={"every": 2}, out=tmp_path, cluster=cluster(2)
        )
