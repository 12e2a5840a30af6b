"""Gossip while simulated hosts fail and others come: the model is what one process makes of the same exchanges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.checkpoint import Checkpoint
from paceline.cluster.description import Cluster
from paceline.elastic import Elastic, Member
from paceline.engines.virtual.survival.lives import Lives
from paceline.engines.virtual.survival.reforming import VirtualReforming
from paceline.outer import Momentum
from paceline.running.result import Result
from paceline.strategies.gossip.synchronizer import GossipSynchronizer
from paceline.topology import Chain, OnePeerExponential, RandomPairs, Ring, Star
from paceline.training.elastic import Survivor
from tests.conformance.commits import write_down
from tests.conformance.test_virtual_failures import CLUSTER, FAILING, SPOT, named
from tests.gossip_replay import Batch, Replay, Replica

EPOCHS, SAMPLES, WORKERS = 3, 96, 4


class Committed(NamedTuple):
    epoch: int
    """Of the membership."""
    parts: dict[int, list[Batch]]
    givers: dict[int, int]
    """Of those who have joined in it, whose state each has."""


def make() -> Replica:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(SAMPLES, 10, generator=generator), torch.arange(SAMPLES) % 4
    torch.manual_seed(3)
    model = nn.Linear(10, 4)
    return Replica(model, SGD(model.parameters(), lr=0.1, momentum=0.5), inputs, labels)


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> dict[int, Committed]:
    """What each exchange that all have applied was made of, with the weights at which batches were handed out."""
    found: dict[int, Committed] = {}

    def written(member: Member, batches: list[Batch], givers: dict[int, int]) -> None:
        one = found.setdefault(member.applied, Committed(member.membership.epoch, {}, {}))
        assert one.epoch == member.membership.epoch
        one.parts[member.rank] = [batch for batch in batches if batch[1]]
        one.givers.update(givers)

    write_down(monkeypatch, written)
    return found


def train(
    out: Path,
    strategy: str,
    *,
    cluster: Cluster,
    epochs: int = EPOCHS,
    workers: int = WORKERS,
    max_steps: int | None = None,
    resume: Path | None = None,
    eval_every: int | None = None,
    **elastic: Any,
) -> Result:
    def script() -> None:
        worker = paceline.init()
        mine = make()
        data = TensorDataset(mine.inputs, mine.labels)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        model, optimizer, loader = worker.prepare(mine.model, mine.optimizer, loader)
        worker.evaluation(lambda model: {"zero": 0.0})
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    settings = {"at_least": 1, "at_most": 6, "replacements": 50, "global_batch": "grow", **elastic}
    return paceline.run(
        script,
        strategy=strategy,
        workers=workers,
        engine="virtual",
        cluster=cluster,
        max_steps=max_steps,
        resume=resume,
        eval_every=eval_every,
        elastic=Elastic(**settings) if elastic.get("at_least", 1) else None,
        out=out,
    )


def require_replayed(result: Result, committed: dict[int, Committed], replay: Replay) -> None:
    """Each sample counts once an epoch, and the mean model is what one process makes of the exchanges."""
    counted = Counter(i for each in committed.values() for part in each.parts.values() for own, _ in part for i in own)
    assert counted == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES
    for number in sorted(committed):
        one = committed[number]
        replay.exchange(one.parts, epoch=one.epoch, givers=one.givers)
    saved = result.model_state()
    own = torch.cat([saved[name].reshape(-1) for name, _ in make().model.named_parameters()])
    torch.testing.assert_close(own, replay.mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "replay"),
    [
        ("gossip", Replay(make, Ring())),
        ("gossip:order=awc", Replay(make, Ring(), order="awc")),
        ("gossip:topology=star:every=3", Replay(make, Star(), every=3)),
        ("gossip:every=2:order=awc", Replay(make, Ring(), every=2, order="awc")),
        ("gossip:codec=top-k:codec.ratio=1", Replay(make, Ring())),  # a codec that leaves out nothing
        ("gossip:codec=top-k:codec.ratio=1:order=awc", Replay(make, Ring(), order="awc")),
        ("gossip:codec=auto:codec.after=2", Replay(make, Ring())),  # links are quick, so that it chooses none
        ("sgp", Replay(make, OnePeerExponential(), mode="push-sum")),
        ("gossip:mode=push-sum:topology=star", Replay(make, Star(), mode="push-sum")),
        ("gossip:mode=running-sums:topology=star", Replay(make, Star(), mode="push-sum")),
        ("relay", Replay(make, Chain(), mode="relay")),
        ("noloco:every=3", Replay(make, RandomPairs(), mode="outer", every=3, outer=Momentum(lr=0.7, momentum=0.5))),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_hosts_fail_and_others_come(tmp_path: Path, committed, strategy: str, replay: Replay) -> None:
    result = train(tmp_path / "run", strategy, cluster=FAILING)
    assert len(named(result, "lost")) > 1
    assert any(event["joined"] for event in named(result, "reformed"))
    require_replayed(result, committed, replay)


def test_who_joins_has_the_seconds_state_where_the_first_dies_before_it_gives(
    tmp_path: Path, committed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fails, and its replacement is there when the first one fails, too: after an exchange, where all meet to
    evaluate. So the second gives, before any exchange without the first."""
    lives: list[Lives] = []
    meet = Survivor.repeated

    def begin(drawn: Lives, _: object) -> None:
        lives.append(drawn)
        drawn._timeline.meanwhile(1.5, drawn._on_gone, 3)

    def struck(survivor: Survivor, *given: Any) -> Any:
        if lives and survivor._member.rank == 0 and survivor._member.applied >= 4:
            process = cast(VirtualReforming, survivor._run.context.reform)._process
            process.post(lives.pop()._on_gone, 0)
            process.settle()
        return meet(survivor, *given)

    monkeypatch.setattr(Lives, "begin", begin)
    monkeypatch.setattr(Survivor, "repeated", struck)
    result = train(tmp_path / "run", "gossip", cluster=CLUSTER, eval_every=4)
    joining = next(each for _, each in sorted(committed.items()) if each.givers)
    assert (sorted(joining.parts), joining.givers) == ([1, 2, 4], {4: 1})
    before = max(number for number, each in committed.items() if 0 in each.parts)
    assert committed[before + 1] is joining
    require_replayed(result, committed, Replay(make, Ring()))


def test_with_notice_nobody_is_lost(tmp_path: Path, committed) -> None:
    result = train(tmp_path / "run", "gossip", cluster=SPOT)
    assert len(named(result, "left")) > 1
    assert named(result, "lost") == []
    require_replayed(result, committed, Replay(make, Ring()))


@pytest.mark.parametrize("order", ["atc", "awc"])
def test_the_last_exchange_of_who_leaves_has_whole_models(
    tmp_path: Path, committed, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """What its codec has kept from its neighbours they would never hear. It is that of the topology's matrix, as those
    after it are not, in which the codec leaves out most of what neighbours do not know yet."""
    mixed: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
    mix = GossipSynchronizer._mix

    def watched(synchronizer: GossipSynchronizer, lost: set[int]) -> None:
        recovery, own = synchronizer.context.recovery, synchronizer._model.parcel.values[0]
        before = own.clone()
        mix(synchronizer, lost)
        assert isinstance(recovery, Survivor)
        mixed.setdefault(recovery._member.applied + 1, {})[recovery._member.rank] = before, own.clone()

    monkeypatch.setattr(GossipSynchronizer, "_mix", watched)
    strategy = f"gossip:codec=top-k:codec.ratio=0.1:codec_scope=all:order={order}"
    result = train(tmp_path / "run", strategy, cluster=SPOT)
    leavers = {int(event.who.removeprefix("worker-")) for event in result.events if event.name == "left"}
    assert len(leavers) > 1
    last = {max(number for number, models in mixed.items() if leaver in models) for leaver in leavers}
    for number, models in mixed.items():
        ranks = sorted(models)
        before, after = (torch.stack([models[rank][i] for rank in ranks]) for i in (0, 1))
        if torch.equal(before, before[:1].expand_as(before)):  # as at first, or of one worker
            continue
        is_whole = torch.allclose(after, Ring().matrix(0, len(ranks)).float() @ before, rtol=1e-4, atol=1e-6)
        assert is_whole == (number in last)


@pytest.mark.parametrize("strategy", ["gossip", "gossip:order=awc", "sgp"])
def test_while_nobody_dies_it_is_the_static_run(tmp_path: Path, strategy: str) -> None:
    """Bit for bit. Each exchange has an all-reduce of 8 bytes beside its messages: six messages one after the other on
    four hosts, of 50 us each."""
    static, elastic = (
        train(tmp_path / name, strategy, cluster=CLUSTER, at_least=least) for name, least in (("static", 0), ("on", 1))
    )
    torch.testing.assert_close(elastic.model_state(), static.model_state(), rtol=0, atol=0)
    more_s = (elastic.training_time_s - static.training_time_s) / (EPOCHS * SAMPLES / 16)
    assert more_s == pytest.approx(6 * 50e-6, rel=0.02)


@pytest.mark.parametrize("size", [3, 5])
def test_weights_of_a_run_that_goes_on_with_others_add_up(tmp_path: Path, size: int) -> None:
    """Push-sum's are 1.6 in the middle of a star of four, and 0.8 at its ends, after some exchanges."""
    saved = {}
    for out, workers, max_steps, resume in (
        ("first", WORKERS, 4, None),
        ("second", size, 5, tmp_path / "first"),
    ):
        train(tmp_path / out, "sgp:topology=star", cluster=CLUSTER, workers=workers, max_steps=max_steps, resume=resume)
        checkpoint = Checkpoint.decode((tmp_path / out / "checkpoint.pt").read_bytes(), where="")
        saved[out] = [float(worker.own["gossip.weight"]) for worker in checkpoint.workers]
    assert len(set(saved["first"])) > 1
    assert (len(saved["second"]), sum(saved["second"])) == (size, pytest.approx(size))


def test_exchanges_are_counted_where_passes_end_with_one(tmp_path: Path) -> None:
    """Six steps a pass, and an exchange after the fourth and the sixth."""
    train(tmp_path / "out", "gossip:topology=one-peer:every=4", cluster=CLUSTER)
    checkpoint = Checkpoint.decode((tmp_path / "out" / "checkpoint.pt").read_bytes(), where="")
    (number,) = (tensor for name, tensor in checkpoint.workers[0].own.items() if name == "gossip.exchanges")
    assert (checkpoint.iteration, int(number)) == (18, 6)
