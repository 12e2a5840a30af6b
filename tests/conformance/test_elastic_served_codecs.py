"""Pushes to servers are coded while simulated hosts fail, leave and come: what a codec leaves out is owed until it is
sent, once."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster
from paceline.elastic import Elastic
from paceline.records import EventRecord, UpdateRecord, read_records
from paceline.running.result import Result
from paceline.server.coded_push import CodedPushes
from tests.conformance.test_virtual_failures import named
from tests.conformance.test_virtual_servers_outlive import BATCH, CLUSTER, EPOCHS, FAILING, SAMPLES, SPOT, WORKERS
from tests.covering import in_turns

SERVERS = 2


class Tally(nn.Module):
    """Each gradient takes one from an element of each half for each of its samples, so that sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ParameterList([torch.zeros(SAMPLES) for _ in range(SERVERS)])

    def forward(self, index: Tensor) -> Tensor:
        loss: Tensor = -self.halves[0][index].sum() - self.halves[1][index].sum()
        return loss


@dataclass(frozen=True)
class Push:
    """What a worker had for one server, and what became of it."""

    own: Tensor
    owed: Tensor
    sent: Tensor
    left: Tensor
    is_last: bool


Pushes = dict[tuple[int, int], list[Push]]
"""By server and worker, in their order."""


def whole(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).clone()


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> Pushes:
    """Simulated servers read what a codec has made of gradients where the worker has them."""
    found: Pushes = defaultdict(list)
    methods = {name: getattr(CodedPushes, name) for name in ("encode", "take_along")}

    def recorded(name: str, pushed: CodedPushes, **given: Any) -> None:
        (shard,) = pushed._shards
        gradients = shard.gradients
        own, nothing = whole(gradients), [torch.zeros_like(each) for each in gradients]
        owed = whole(nothing if shard.left is None else shard.left)
        methods[name](pushed, **given)
        pushed.decode_in_place()
        left = whole(shard.left_next or nothing)
        found[pushed._server, pushed._rank].append(Push(own, owed, whole(gradients), left, name == "take_along"))

    monkeypatch.setattr(CodedPushes, "encode", lambda self, **given: recorded("encode", self, **given))
    monkeypatch.setattr(CodedPushes, "take_along", lambda self, **given: recorded("take_along", self, **given))
    return found


def train(out: Path, strategy: str, cluster: Cluster, *, seed: int = 0, at_least: int = 1) -> Result:
    def script() -> None:
        worker, model = paceline.init(), Tally()
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
        prepared, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        for _ in range(EPOCHS):
            for (index,) in loader:
                optimizer.zero_grad()
                prepared(index).backward()
                optimizer.step()

    elastic = Elastic(at_least=at_least, at_most=5, replacements=50, global_batch="grow") if at_least else None
    return paceline.run(
        script,
        strategy=strategy,
        workers=WORKERS,
        options={"servers": SERVERS},
        engine="virtual",
        cluster=cluster,
        seed=seed,
        elastic=elastic,
        out=out,
    )


def halves_of(result: Result) -> list[Tensor]:
    model = load_file(result.directory / "model.safetensors")
    return [model[f"halves.{server}"] for server in range(SERVERS)]


def require_nothing_lost(result: Result, pushes: Pushes, *, votes: bool = False) -> None:
    """Of each worker's gradients all that is not sent is owed with the next push, if the one before has counted, and
    the model is made of what was sent with pushes that count: each sample's gradient, but for what is owed at last."""
    updates = list(read_records(result.directory, UpdateRecord))
    assert named(result, "left_over") == []
    for server in range(SERVERS):
        counted, by_update = Counter[int](), defaultdict[int, list[Tensor]](list)
        for each in sorted((each for each in updates if each.server == server), key=lambda each: each.clock):
            by_update[each.iteration].append(pushes[server, each.worker][counted[each.worker]].sent)
            counted[each.worker] += 1
        owns, owed = [], []
        for rank, number in counted.items():
            own = pushes[server, rank]
            assert number <= len(own) <= number + 1, "the last one of a worker that dies may count nowhere"
            for before, push in zip([None, *own], own, strict=False):
                assert torch.equal(push.owed, torch.zeros(SAMPLES) if before is None else before.left)
            owns += [push.own for push in own[:number]]
            owed.append(own[number - 1].left)
            if not votes:
                for push in own:
                    torch.testing.assert_close(push.own + push.owed, push.sent + push.left)
        assert torch.equal(torch.stack(owns).sum(0), torch.full((SAMPLES,), -float(EPOCHS)))
        sums = [torch.stack(sent).sum(0) for sent in by_update.values()]
        made = [each.sign() for each in sums] if votes else list(map(torch.div, sums, map(len, by_update.values())))
        torch.testing.assert_close(halves_of(result)[server], -torch.stack(made).sum(0))
        if len(sums) == len(updates) / SERVERS:  # each gradient is an update
            missing = torch.full((SAMPLES,), float(EPOCHS)) - halves_of(result)[server]
            torch.testing.assert_close(missing, -torch.stack(owed).sum(0))


TOP = "codec=top-k:codec.ratio=0.03"  # three of a tensor's elements; a batch has four, besides what is owed


OWING = (f"ps-bsp:{TOP}", f"ps-ssp:{TOP}:codec_scope=all", f"ps-asp:{TOP}", "ps-asp:codec=one-bit")


@pytest.mark.parametrize(("how", "strategy"), in_turns(OWING, ("failing", "with notice"), are_quick=True))
def test_what_is_left_out_is_owed_until_it_is_sent(tmp_path: Path, pushes: Pushes, strategy: str, how: str) -> None:
    """Whoever leaves with notice owes nothing then; of one that dies what it owes is lost, and that of nobody else."""
    cluster = FAILING if how == "failing" else SPOT
    result = train(tmp_path / "run", strategy, cluster)
    assert named(result, "let_in")
    require_nothing_lost(result, pushes)
    assert any(push.left.any() for own in pushes.values() for push in own)
    name = "lost" if cluster is FAILING else "left"
    events = [event for event in read_records(result.directory, EventRecord) if event.name == name]
    gone = [int(event.who.removeprefix("worker-")) for event in events]
    assert len(gone) > 1
    last = [pushes[server, rank][-1] for rank in gone for server in range(SERVERS) if pushes[server, rank]]
    if cluster is SPOT:
        assert not any(push.left.any() for push in last)
        assert any(push.is_last and push.owed.any() for push in last)
    else:
        assert not any(push.is_last for own in pushes.values() for push in own)


@pytest.mark.parametrize("cluster", [FAILING, SPOT], ids=["failing", "with notice"])
def test_those_who_are_there_vote(tmp_path: Path, pushes: Pushes, cluster: Cluster) -> None:
    result = train(tmp_path / "run", "ps-bsp:codec=sign:codec_scope=all", cluster)
    assert named(result, "let_in")
    require_nothing_lost(result, pushes, votes=True)


@pytest.mark.parametrize("strategy", [f"ps-bsp:{TOP}", f"ps-asp:{TOP}"])
def test_while_nobody_dies_it_is_the_static_run(tmp_path: Path, strategy: str) -> None:
    static, elastic = (train(tmp_path / f"{least}", strategy, CLUSTER, at_least=least) for least in (0, 1))
    assert all(map(torch.equal, halves_of(static), halves_of(elastic)))
