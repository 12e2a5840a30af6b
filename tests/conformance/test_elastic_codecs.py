"""Exchanges are coded while simulated hosts fail and others come: what a codec leaves out is owed until it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from paceline.training.checkpoints import Checkpoints
from paceline.training.elastic import Survivor
from tests.conformance import test_elastic_gossip as runs
from tests.conformance.test_elastic_gossip import Committed, committed, named, train  # noqa: F401  # a fixture
from tests.conformance.test_virtual_failures import FAILING
from tests.gossip_replay import Replica

LR = 0.1
Left = dict[int, dict[int, Tensor]]
"""What each worker has left out, after each exchange."""


def make() -> Replica:
    """One matrix of 64 numbers, which fill the exchanged memory without a gap."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(runs.SAMPLES, 16, generator=generator), torch.arange(runs.SAMPLES) % 4
    torch.manual_seed(3)
    model = nn.Linear(16, 4, bias=False)
    return Replica(model, SGD(model.parameters(), lr=LR), inputs, labels)


def left_of(worker: Survivor | Checkpoints) -> Tensor:
    """Without what stands behind the 64 numbers."""
    state = worker._run.prepared.synchronizer.own_state()
    return state["exchange.0.left"].tensor[:64].clone()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch, committed: dict[int, Committed]) -> Left:  # noqa: F811
    """Under the rank -1 it is what the giver had left out by then, whose state those who join next have taken."""
    found: Left = {}
    commit, give = Survivor.commit, Checkpoints.of_this_worker

    def settled(survivor: Survivor) -> bool:
        is_complete = commit(survivor)
        found.setdefault(survivor._member.applied, {})[survivor._member.rank] = left_of(survivor)
        return is_complete

    def given(checkpoints: Checkpoints, *args: Any) -> Any:
        found[max(found)][-1] = left_of(checkpoints)
        return give(checkpoints, *args)

    monkeypatch.setattr(runs, "make", make)
    monkeypatch.setattr(Survivor, "commit", settled)
    monkeypatch.setattr(Checkpoints, "of_this_worker", given)
    return found


def gradient_of(weights: Tensor, index: list[int]) -> Tensor:
    mine = make()
    own = weights.clone().requires_grad_()
    F.cross_entropy(mine.inputs[index] @ own.view(4, 16).T, mine.labels[index]).backward()
    assert own.grad is not None
    return own.grad


def of_gradients(weights: Tensor, parts: Mapping[int, list[Any]]) -> dict[int, Tensor]:
    """Each counts by its samples; one who joins has none."""
    num_samples = sum(len(index) for batches in parts.values() for index, _ in batches)
    return {
        rank: sum((len(index) * gradient_of(weights, index) for index, _ in batches), torch.zeros(64))
        * len(parts)
        / num_samples
        for rank, batches in parts.items()
    }


def of_rounds(weights: Tensor, parts: Mapping[int, list[Any]]) -> dict[int, Tensor]:
    """Each counts by its samples; what moves is how parameters have changed."""
    found = {}
    totals = [sum(len(index) for index, _ in batches) for batches in zip(*filter(None, parts.values()), strict=True)]
    for rank, batches in parts.items():
        own = weights.clone()
        for index, _ in batches:
            own -= LR * gradient_of(own, index)
        shares = [len(index) / total for (index, _), total in zip(batches, totals, strict=False)]
        found[rank] = (weights - own) * sum(shares) / max(1, len(totals)) * len(parts)
    return found


@pytest.mark.parametrize(
    ("strategy", "sent", "rate"),
    [
        ("all-reduce:codec=top-k:codec.ratio=0.1:codec_scope=all", of_gradients, LR),
        ("all-reduce:codec=dct:codec.decay=1", of_gradients, LR),
        ("local-sgd:every=2:codec=top-k:codec.ratio=0.1:codec_scope=all", of_rounds, 1.0),
    ],
)
def test_what_is_left_out_is_owed_until_it_is_sent(
    tmp_path: Path,
    committed: dict[int, Committed],  # noqa: F811
    left: Left,
    strategy: str,
    sent: Callable[[Tensor, Mapping[int, list[Any]]], dict[int, Tensor]],
    rate: float,
) -> None:
    """Each mean is what workers have, with what each owed before and without what it owes afterwards: of those who stay
    nothing is lost or sent twice, whoever dies or comes."""
    result = train(tmp_path / "run", strategy, cluster=FAILING)
    assert len(named(result, "lost")) > 1
    assert any(event["joined"] for event in named(result, "reformed"))
    weights = make().vector
    owed: dict[int, Tensor] = {}
    for number in sorted(committed):
        parts, now = committed[number].parts, left[number]
        contributions = sent(weights, parts)
        means = []
        for rank, own in contributions.items():
            joins = bool(owed) and rank not in owed
            before = owed[-1] if joins and strategy.endswith("codec_scope=all") else owed.get(rank, torch.zeros(64))
            means.append(own + before - now[rank])
        weights = weights - rate * torch.stack(means).mean(0)
        owed = now
    saved = load_file(result.directory / "model.safetensors")["weight"].reshape(-1)
    torch.testing.assert_close(saved, weights, rtol=1e-4, atol=1e-6)
