"""Rounds of local steps while simulated hosts fail and others come: the model is what one process makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from paceline.elastic import Member
from paceline.running.result import Result
from tests.conformance import test_elastic_gossip as runs
from tests.conformance.commits import write_down
from tests.conformance.test_elastic_gossip import EPOCHS, SAMPLES, train
from tests.conformance.test_virtual_failures import CLUSTER, FAILING, SPOT, named
from tests.covering import in_turns
from tests.gossip_replay import Batch, Replica
from tests.rounds_replay import Exchange, Replay, rounds_of

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.5),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
}


def make(optimizer: str = "sgd") -> Replica:
    """Four tensors, which are dealt out among fragments."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(SAMPLES, 10, generator=generator), torch.arange(SAMPLES) % 4
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 4))
    return Replica(model, OPTIMIZERS[optimizer](model.parameters()), inputs, labels)


Seen = dict[int, Exchange]
"""What each exchange that all have applied was made of."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found: Seen = {}

    def written(member: Member, batches: list[Batch], givers: dict[int, int]) -> None:
        one = found.setdefault(member.applied, Exchange({}, {}))
        one.parts[member.rank] = [own for own, _ in batches]
        one.givers.update(givers)

    write_down(monkeypatch, written)
    return found


def require_replayed(result: Result, seen: Seen, replay: Replay) -> None:
    """Each sample counts once an epoch, and the shared model is what one process makes of the exchanges."""
    counted = Counter(i for one in seen.values() for parts in one.parts.values() for part in parts for i in part)
    assert counted == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES
    for number in sorted(seen):
        replay.exchange(seen[number])
    saved = result.model_state()
    for (name, _), own in zip(make().model.named_parameters(), replay.shared, strict=True):
        torch.testing.assert_close(saved[name], own.detach(), rtol=1e-4, atol=1e-6)


ROUNDS = {
    "local-sgd:every=2:momentum_every=1": "sgd",
    "des-loc:every=1:momentum_every=1:variance_every=2": "adam",
    "local-sgd:every=2:fragments=2": "sgd",
    "diloco:every=3:fragments=3": "sgd",
    "diloco:every=2:fragments=2:alpha=0.5": "sgd",
    "local-sgd:every=2:fragments=2:momentum_every=2": "sgd",
    "local-sgd:every=3:delay=1:momentum_every=2": "sgd",
    "diloco:every=3:delay=2:alpha=0.5": "sgd",
    "diloco:every=6:fragments=2:delay=2:alpha=0.5": "sgd",
}


@pytest.mark.parametrize(("how", "strategy"), in_turns(ROUNDS, ("failing", "with notice"), are_quick=True))
def test_hosts_fail_and_others_come(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, strategy: str, how: str
) -> None:
    cluster = FAILING if how == "failing" else SPOT
    monkeypatch.setattr(runs, "make", lambda: make(ROUNDS[strategy]))
    result = train(tmp_path / "run", strategy, cluster=cluster)
    assert len(named(result, "lost" if cluster is FAILING else "left")) > 1
    assert any(event["joined"] for event in named(result, "reformed"))
    require_replayed(result, seen, Replay(lambda: make(ROUNDS[strategy]), rounds_of(strategy)))


@pytest.mark.parametrize("strategy", ROUNDS)
def test_while_nobody_dies_it_is_the_static_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """Bit for bit. With a delay each exchange has an all-reduce of 4 bytes besides: six messages one after the other on
    four hosts, of 50 us each; there are six exchanges."""
    monkeypatch.setattr(runs, "make", lambda: make(ROUNDS[strategy]))
    static, elastic = (
        train(tmp_path / name, strategy, cluster=CLUSTER, at_least=least) for name, least in (("static", 0), ("on", 1))
    )
    torch.testing.assert_close(elastic.model_state(), static.model_state(), rtol=0, atol=0)
    more_s = 6 * 6 * 50e-6 if "delay" in strategy else 0.0
    assert elastic.training_time_s - static.training_time_s == pytest.approx(more_s, rel=0.02, abs=1e-5)
