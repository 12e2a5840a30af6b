"""Exchanges are coded while simulated hosts fail and others come: what a codec leaves out is owed until it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from paceline.codec import PowerSGD
from paceline.running.result import Result
from paceline.seeding import derive
from paceline.training.checkpoints import Checkpoints
from paceline.training.elastic import Survivor
from tests.conformance import test_elastic_gossip as runs
from tests.conformance.test_elastic_gossip import Committed, committed, named, train  # noqa: F401  # a fixture
from tests.conformance.test_virtual_failures import FAILING, SPOT
from tests.gossip_replay import Replica

LR = 0.1
Left = dict[int, dict[int, Tensor]]
"""What each worker has left out, after each exchange."""
Sent = Callable[[Tensor, Mapping[int, list[Any]]], dict[int, Tensor]]
"""What each worker has for an exchange, of the weights that all begin with and of what it trains on."""


def make(outputs: int = 4) -> Replica:
    """One matrix of 16 numbers an output, which fill the exchanged memory without a gap."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(runs.SAMPLES, 16, generator=generator), torch.arange(runs.SAMPLES) % 4
    torch.manual_seed(3)
    model = nn.Linear(16, outputs, bias=False)
    return Replica(model, SGD(model.parameters(), lr=LR), inputs, labels)


def left_of(worker: Survivor | Checkpoints) -> Tensor:
    """Without what stands behind the matrix; zeros while nothing is coded."""
    synchronizer = worker._run.prepared.synchronizer
    num_elements = sum(spec.num_bytes for spec in synchronizer.replica.specs) // 4
    state = synchronizer.own_state().get("exchange.0.left")
    return torch.zeros(num_elements) if state is None else state.tensor[:num_elements].clone()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch, committed: dict[int, Committed]) -> Left:  # noqa: F811
    """Under the rank -1 it is what the giver had left out by then, whose state those who join next have taken."""
    found: Left = {}
    commit, give = Survivor.commit, Checkpoints.of_this_worker

    def settled(survivor: Survivor, **named: Any) -> bool:
        is_complete = commit(survivor, **named)
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
    F.cross_entropy(mine.inputs[index] @ own.view(-1, 16).T, mine.labels[index]).backward()
    assert own.grad is not None
    return own.grad


def of_gradients(weights: Tensor, parts: Mapping[int, list[Any]]) -> dict[int, Tensor]:
    """Each counts by its samples; one who joins has none."""
    num_samples = sum(len(index) for batches in parts.values() for index, _ in batches)
    return {
        rank: sum((len(index) * gradient_of(weights, index) for index, _ in batches), torch.zeros_like(weights))
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
    sent: Sent,
    rate: float,
) -> None:
    """Each mean is what workers have, with what each owed before and without what it owes afterwards: of those who stay
    nothing is lost or sent twice, whoever dies or comes."""
    result = train(tmp_path / "run", strategy, cluster=FAILING)
    assert len(named(result, "lost")) > 1
    assert any(event["joined"] for event in named(result, "reformed"))
    require_nothing_lost(result, committed, left, make().vector, sent, rate, copies=strategy.endswith("scope=all"))


@pytest.mark.parametrize(
    ("strategy", "sent", "rate"),
    [
        ("all-reduce:codec=top-k:codec.ratio=0.1:codec_scope=all", of_gradients, LR),
        ("all-reduce:codec=top-k:codec.ratio=0.1", of_gradients, LR),
        ("all-reduce:codec=one-bit:codec_scope=all", of_gradients, LR),
        ("all-reduce:codec=powersgd:codec.rank=1:codec.start=0", of_gradients, LR),
        ("local-sgd:every=2:codec=top-k:codec.ratio=0.1", of_rounds, 1.0),
    ],
)
def test_who_leaves_owes_nothing(
    tmp_path: Path,
    committed: dict[int, Committed],  # noqa: F811
    left: Left,
    strategy: str,
    sent: Sent,
    rate: float,
) -> None:
    """Its last exchange has all that anybody owes, so that with notice nothing is lost of whoever goes."""
    result = train(tmp_path / "run", strategy, cluster=SPOT)
    leavers = {int(event.who.removeprefix("worker-")) for event in result.events if event.name == "left"}
    assert len(leavers) > 1
    assert named(result, "lost") == []
    for leaver in leavers:
        last = max(number for number, one in committed.items() if one.parts.get(leaver))
        assert not any(each.any() for rank, each in left[last].items() if rank >= 0)
    assert any(each.any() for each in left[min(left)].values())
    if "one-bit" not in strategy:  # what it leaves out of the mean that it encodes for all is kept apart
        require_nothing_lost(result, committed, left, make().vector, sent, rate, copies=strategy.endswith("scope=all"))


def require_nothing_lost(
    result: Result,
    committed: dict[int, Committed],  # noqa: F811
    left: Left,
    weights: Tensor,
    sent: Sent,
    rate: float,
    *,
    copies: bool = False,
) -> None:
    """`copies`: who joins owes as much as who has given it its state."""
    owed: dict[int, Tensor] = {}
    for number in sorted(committed):
        now, means = left[number], []
        for rank, own in sent(weights, committed[number].parts).items():
            joins = bool(owed) and rank not in owed
            before = owed[-1] if joins and copies else owed.get(rank, torch.zeros_like(weights))
            means.append(own + before - now[rank])
        weights = weights - rate * torch.stack(means).mean(0)
        owed = now
    saved = result.model_state()["weight"].reshape(-1)
    torch.testing.assert_close(saved, weights, rtol=1e-4, atol=1e-6)


SLOW = replace(
    FAILING,
    hosts=(replace(FAILING.hosts[0], bandwidth_gbit_per_s=1e-2),),
    compute=replace(FAILING.compute, failures_per_hour=50.0),
)


@pytest.mark.parametrize(
    ("strategy", "sent", "rate"),
    [
        ("all-reduce:codec=auto:codec.among=top-k:codec.after=2", of_gradients, LR),
        ("local-sgd:every=2:codec=auto:codec.among=top-k:codec.after=2", of_rounds, 1.0),
    ],
)
def test_auto_chooses_a_codec_for_those_who_are_there_and_those_who_come(
    tmp_path: Path,
    committed: dict[int, Committed],  # noqa: F811
    left: Left,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    sent: Sent,
    rate: float,
) -> None:
    """Once, after which all code, whoever has joined since: an exchange of 256 kB takes longer than a step here."""
    monkeypatch.setattr(runs, "make", lambda: make(4096))
    result = train(tmp_path / "run", strategy, cluster=SLOW, epochs=8)
    assert len(named(result, "lost")) > 1
    (told,) = {event["codec"] for event in named(result, "tuned") if "codec" in event}
    assert told.startswith("top-k: a ")
    begins = next(number for number in sorted(left) if any(each.any() for each in left[number].values()))
    assert any(one.givers for number, one in committed.items() if number > begins)
    for number in range(begins, max(left) + 1):
        assert all(each.any() for rank, each in left[number].items() if committed[number].parts.get(rank))
    require_nothing_lost(result, committed, left, make(4096).vector, sent, rate)


@pytest.mark.parametrize(
    ("strategy", "sent", "rate"),
    [
        ("all-reduce:codec=powersgd:codec.rank=1:codec.start=0:codec_scope=all", of_gradients, LR),
        ("all-reduce:codec=powersgd:codec.rank=1:codec.start=0", of_gradients, LR),
        ("local-sgd:every=2:codec=powersgd:codec.rank=1:codec.start=0:codec_scope=all", of_rounds, 1.0),
    ],
)
def test_means_of_low_rank_are_those_of_one_process(
    tmp_path: Path,
    committed: dict[int, Committed],  # noqa: F811
    left: Left,
    strategy: str,
    sent: Sent,
    rate: float,
) -> None:
    """It has one matrix, whose factor begins anew with each change of who is there, and what each worker owes: of its
    own, what the factor does not span. So all have had the same factor, also who has joined; and who dies takes nothing
    along but what it owed itself. What is owed is looked at after each exchange, and taken from there: rounding grows
    from step to step."""
    result = train(tmp_path / "run", strategy, cluster=FAILING)
    assert len(named(result, "lost")) > 1
    assert any(event["joined"] for event in named(result, "reformed"))
    weights, owed = make().vector, dict[int, Tensor]()
    epoch, right = 0, torch.zeros(16)
    for number in sorted(committed):
        one = committed[number]
        if one.epoch != epoch:
            epoch, right = one.epoch, PowerSGD(rank=1).begin([(4, 16)], weights, seed=derive(0, "codec"))
        if strategy.endswith("codec_scope=all"):
            owed |= {rank: owed[giver] for rank, giver in one.givers.items()}
        whole = {rank: own + owed.get(rank, torch.zeros(64)) for rank, own in sent(weights, one.parts).items()}
        matrix = torch.stack([*whole.values()]).mean(0).view(4, 16)
        basis = matrix @ (right / right.norm())
        basis /= basis.norm()
        projection, right = torch.outer(basis, basis), matrix.T @ basis
        weights = weights - rate * (projection @ matrix).reshape(-1)
        for rank, each in whole.items():
            rest = each - (projection @ each.view(4, 16)).reshape(-1)
            torch.testing.assert_close(left[number][rank], rest, rtol=1e-3, atol=1e-5)
        owed = left[number]
    saved = result.model_state()["weight"].reshape(-1)
    torch.testing.assert_close(saved, weights, rtol=1e-3, atol=1e-5)
