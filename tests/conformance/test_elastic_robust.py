"""Hostile workers and robust aggregators while simulated hosts fail and others come: the model is what one process
makes of the same rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import pieces
from paceline.aggregate import MEAN, Aggregator, Contribution, counted, join
from paceline.attacks import DataAttack, SentAttack, parse
from paceline.cluster.description import Cluster, Servers
from paceline.elastic import Deal, Elastic
from paceline.errors import RunFailed
from paceline.records import UpdateRecord, read_records
from paceline.running.result import Result
from paceline.server.shard import Shard
from paceline.server.whole_updates import Share
from paceline.training.elastic import Survivor
from tests.conformance.test_virtual_failures import CLUSTER, named
from tests.conformance.test_virtual_servers_outlive import SERVERS_HOSTS

EPOCHS, SAMPLES, WORKERS, BATCH = 3, 96, 7, 3
LEAST = 4
"""What Krum takes, of whose contributions one is hostile."""
MANY = replace(CLUSTER, hosts=(replace(CLUSTER.hosts[0], count=12),))
FAILING = replace(MANY, compute=replace(MANY.compute, failures_per_hour=100.0))


@dataclass
class Round:
    """What an exchange that all have applied was made of."""

    ranks: tuple[int, ...]
    deals: tuple[Deal, ...]
    """Of each batch since the exchange before."""
    is_complete: bool
    trained: dict[int, list[list[int]]] = field(default_factory=dict)
    """What each has trained on, which may be another's sample that counts nothing."""

    def weights(self, place: int) -> list[float]:
        return [deal.weight(place) for deal in self.deals]


Rounds = dict[int, Round]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    found: Rounds = {}
    commit = Survivor.commit

    def noted(survivor: Survivor, **given: Any) -> bool:
        ranks, deals = survivor._dealt.ranks, survivor._dealt.under_way
        is_complete = commit(survivor, **given)
        rank = survivor._member.rank
        one = found.setdefault(survivor._member.applied, Round(ranks, deals, is_complete))
        assert (one.ranks, one.deals, one.is_complete) == (ranks, deals, is_complete)
        one.trained[rank] = LATEST.pop(rank, [])
        return is_complete

    LATEST.clear()
    monkeypatch.setattr(Survivor, "commit", noted)
    return found


LATEST: dict[int, list[list[int]]] = {}
"""By rank, the batches since its last exchange."""


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 10, generator=generator), torch.arange(SAMPLES) % 4


def made(momentum: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(10, 4)
    return model, SGD(model.parameters(), lr=0.1, momentum=momentum)


def script(momentum: float) -> None:
    worker = paceline.init()
    model, optimizer = made(momentum)
    inputs, labels = data()
    numbered = torch.cat([inputs, torch.arange(SAMPLES)[:, None].float()], dim=1)
    loader = DataLoader(TensorDataset(numbered, labels), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    worker.evaluation(lambda model: {"zero": 0.0})
    for _ in range(EPOCHS):
        for x, y in loader:
            LATEST.setdefault(worker.rank, []).append(x[:, -1].long().tolist())
            optimizer.zero_grad()
            F.cross_entropy(model(x[:, :-1]), y).backward()
            optimizer.step()


def train(
    out: Path,
    strategy: str,
    aggregate: str = "mean",
    attack: tuple[str, ...] = (),
    *,
    momentum: float = 0.5,
    cluster: Cluster = FAILING,
    **elastic: Any,
) -> Result:
    settings = {"at_least": LEAST, "at_most": 8, "replacements": 50, "global_batch": "grow", **elastic}
    return paceline.run(
        partial(script, momentum),
        strategy=strategy,
        options={"aggregate": aggregate} if aggregate != "mean" else None,
        attack=attack,
        workers=WORKERS,
        engine="virtual",
        cluster=cluster,
        elastic=Elastic(**settings) if elastic.get("at_least", 1) else None,
        out=out,
    )


def each_once(rounds: Rounds) -> None:
    dealt = Counter(sample for one in rounds.values() for deal in one.deals for part in deal.parts for sample in part)
    assert dealt == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


class Replay:
    """One process."""

    def __init__(self, aggregate: str, attack: tuple[str, ...], *, momentum: float) -> None:
        self.aggregator = pieces.read(Aggregator, aggregate)  # type: ignore[type-abstract]
        self.attacks = parse(attack)
        self.model, self.optimizer = made(momentum)
        self.inputs, self.labels = data()

    def gradient(self, rank: int, batch: list[int]) -> Tensor:
        labels = self.labels[batch]
        for attack in self.attacks:
            if isinstance(attack, DataAttack) and attack.is_hostile(rank, size=WORKERS):
                labels = attack.poisoned(self.inputs[batch], labels)[1]
        self.model.zero_grad()
        F.cross_entropy(self.model(self.inputs[batch]), labels).backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in self.model.parameters()])  # type: ignore[union-attr]

    def sent(self, rows: dict[int, Tensor], *, size: int) -> dict[int, Tensor]:
        """`rows`: of those who have samples."""
        for attack in self.attacks:
            if isinstance(attack, SentAttack):
                is_hostile = partial(attack.is_hostile, size=WORKERS)
                honest = torch.stack([row for rank, row in rows.items() if not is_hostile(rank)]).double()
                generator = torch.Generator()
                rows = {
                    rank: attack.sent(row.double(), honest, size=size, generator=generator).float()
                    if is_hostile(rank)
                    else row
                    for rank, row in rows.items()
                }
        return rows

    def joint(self, rows: dict[int, Tensor], weights: dict[int, float]) -> Tensor:
        """As all workers' `weights` say who has samples."""
        has_some = {rank: row for rank, row in rows.items() if weights[rank]}
        if self.aggregator == MEAN:
            has_some = {rank: weights[rank] * row for rank, row in has_some.items()}
        sent = self.sent(has_some, size=len(rows))
        if self.aggregator == MEAN:
            return torch.stack(list(sent.values())).sum(dim=0) / len(rows)
        given = [Contribution(rank, weights[rank], "gradient", [sent.get(rank, row)]) for rank, row in rows.items()]
        out = torch.zeros_like(next(iter(rows.values())))
        (joint,) = self.aggregator.aggregate(counted(self.aggregator, given), [out])
        return joint

    def gradients(self, rounds: Rounds) -> nn.Module:
        """Each step's gradient is joined."""
        joints: list[Tensor] = []
        for number in sorted(rounds):
            one = rounds[number]
            (deal,) = one.deals
            places = dict(zip(one.ranks, range(len(one.ranks)), strict=True))
            rows = {
                rank: self.gradient(rank, one.trained[rank][0] if rank in one.trained else list(deal.parts[place]))
                for rank, place in places.items()
            }
            joint = self.joint(rows, {rank: deal.weight(place) for rank, place in places.items()})
            share = 1.0 if self.aggregator == MEAN else sum(map(len, deal.parts)) / deal.num_samples
            joints.append(joint * share)
            if one.is_complete:
                self.step(torch.stack(joints).sum(dim=0))
                joints = []
        return self.model

    def served(self, rounds: list[dict[int, Pushed]]) -> nn.Module:
        """Each round's gradients are joined, of which hostile workers know their own alone, and add up to updates."""
        total, num_samples = torch.zeros(44), 0
        for one in rounds:
            rows = {}
            for rank, each in one.items():
                row = self.gradient(rank, each.batch)
                rows[rank] = -row if rank >= WORKERS - 2 and rank < WORKERS and each.share.num_samples else row
            weights = {rank: float(each.share.num_samples) for rank, each in one.items()}
            given = [Contribution(rank, weights[rank], "gradient", [row]) for rank, row in rows.items()]
            if not any(weights.values()):
                continue
            num = int(sum(weights.values()))
            of = next(iter(one.values())).share.of or num
            total += num / of * join(self.aggregator, given, [torch.zeros(44)])[0]
            num_samples += num
            if num_samples == of:
                self.step(total)
                total, num_samples = torch.zeros(44), 0
        return self.model

    def step(self, gradient: Tensor) -> None:
        start = 0
        for parameter in self.model.parameters():
            parameter.grad = gradient[start : start + parameter.numel()].view(parameter.shape).clone()
            start += parameter.numel()
        self.optimizer.step()

    def changes(self, rounds: Rounds) -> nn.Module:
        """What each round's local steps have changed is joined."""
        for number in sorted(rounds):
            one = rounds[number]
            start = nn.utils.parameters_to_vector(self.model.parameters()).detach()
            rows, weights = {}, {}
            for place, rank in enumerate(one.ranks):
                nn.utils.vector_to_parameters(start.clone(), self.model.parameters())
                for deal in one.deals:
                    if deal.parts[place]:
                        self.gradient(rank, list(deal.parts[place]))
                        self.optimizer.step()
                rows[rank] = start - nn.utils.parameters_to_vector(self.model.parameters()).detach()
                weights[rank] = fmean(one.weights(place))
            nn.utils.vector_to_parameters(start - self.joint(rows, weights), self.model.parameters())
        return self.model


CASES = [
    ("mean", ("sign-flip",)),
    ("mean", ("model-replacement:workers=2",)),
    ("median", ("alie:workers=2",)),
    ("krum:byzantine=1", ("ipm",)),
    ("trimmed-mean:byzantine=1", ("label-flip:classes=4",)),
]
QUICK = (("mean", ("sign-flip",)), ("krum:byzantine=1", ("ipm",)))


@pytest.mark.parametrize("global_batch", ["keep", "grow"])
@pytest.mark.parametrize(
    ("aggregate", "attack"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=" under ".join(map(str, case)))
        for case in CASES
    ],
)
def test_gradients_are_joined_while_hosts_fail_and_others_come(
    tmp_path: Path, rounds: Rounds, aggregate: str, attack: tuple[str, ...], global_batch: str
) -> None:
    """Who is hostile is so to its end, and who joins is honest."""
    result = train(tmp_path / "run", "all-reduce", aggregate, attack, global_batch=global_batch)
    require_all(result, rounds)
    (told,) = named(result, "attack")
    assert told["who joins"] == "honest"
    assert told["hostile workers"] == [5, 6][-len(told["hostile workers"]) :]
    model = Replay(aggregate, attack, momentum=0.5).gradients(rounds)
    torch.testing.assert_close(result.model_state(), model.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "aggregate"),
    [
        ("local-sgd:every=2", "mean"),
        ("local-sgd:every=2", "krum:byzantine=1"),
        pytest.param("local-sgd:every=3:fragments=1:delay=1", "median", marks=pytest.mark.slow),
    ],
)
def test_changes_are_joined_while_hosts_fail_and_others_come(
    tmp_path: Path, rounds: Rounds, strategy: str, aggregate: str
) -> None:
    attack = ("ipm",)
    result = train(tmp_path / "run", strategy, aggregate, attack, momentum=0.0)
    require_all(result, rounds)
    if "delay" not in strategy:
        model = Replay(aggregate, attack, momentum=0.0).changes(rounds)
        torch.testing.assert_close(result.model_state(), model.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["gossip:every=2", "ad-psgd:topology=chain", "ps-bsp", "ps-asp"])
def test_workers_attack_under_every_elastic_strategy(tmp_path: Path, strategy: str) -> None:
    """Each run comes out alike every time, and otherwise than without the attack."""
    states = []
    for name, attack in (("once", ("gauss",)), ("again", ("gauss",)), ("clean", ())):
        result = train(tmp_path / name, strategy, attack=attack)
        assert named(result, "lost")
        states.append(result.model_state())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])
        assert not torch.equal(tensor, states[2][name])


class Pushed(NamedTuple):
    """A worker's gradient for a round, as servers have it."""

    share: Share
    batch: list[int]
    """Another's sample where the worker has none."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[int, Pushed]]:
    """By round and worker, what servers have made of: those who died in it are there if what they pushed counts."""
    found: dict[int, dict[int, Pushed]] = {}
    latest: dict[int, list[int]] = {}
    push, end_round = Shard.push, Shard._end_round

    def noted(shard: Shard, worker: int, *given: Any, **named: Any) -> Any:
        latest[worker] = LATEST[worker][-1]
        return push(shard, worker, *given, **named)

    def ended(shard: Shard, given: Any) -> None:
        found[given[0].clock] = {each.worker: Pushed(each.share, latest[each.worker]) for each in given}
        end_round(shard, given)

    LATEST.clear()
    monkeypatch.setattr(Shard, "push", noted)
    monkeypatch.setattr(Shard, "_end_round", ended)
    return found


AGGREGATES = [
    "krum:byzantine=1",
    "median",
    "trimmed-mean:byzantine=1",
    "clip:norm=0.5:then=median",
    "multi-krum:byzantine=1",
]


@pytest.mark.parametrize("global_batch", ["keep", "grow"])
@pytest.mark.parametrize(
    "aggregate", [pytest.param(each, marks=[pytest.mark.slow][: number > 1]) for number, each in enumerate(AGGREGATES)]
)
def test_servers_join_a_gradient_of_each_who_is_there(
    tmp_path: Path, served: dict[int, dict[int, Pushed]], aggregate: str, global_batch: str
) -> None:
    """Each sample counts once. Where a round has too few for the aggregator, others' gradients stand in."""
    attack = ("sign-flip:workers=2",)
    result = train(tmp_path / "run", "ps-bsp", aggregate, attack, global_batch=global_batch)
    assert named(result, "lost")
    assert any(event["joined"] for event in named(result, "reformed"))
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES
    rounds = [each for _, each in sorted(served.items())]
    assert Counter(i for one in rounds for each in one.values() if each.share.num_samples for i in each.batch) == (
        Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    )
    assert min(map(len, rounds)) >= LEAST
    counted = Counter(each.clock for each in read_records(result.directory, UpdateRecord))
    assert counted == Counter({clock: sum(p.share.num_samples > 0 for p in served[clock].values()) for clock in served})
    replay = Replay(aggregate, attack, momentum=0.5)
    torch.testing.assert_close(result.model_state(), replay.served(rounds).state_dict(), rtol=1e-4, atol=1e-5)


def test_whoever_is_told_others_gradients_goes_on_when_one_is_lost_between_exchanges(
    tmp_path: Path, rounds: Rounds
) -> None:
    result = train(tmp_path / "run", "gossip:every=3", attack=("sign-flip:workers=2",))
    require_all(result, rounds)


@pytest.mark.parametrize(
    ("strategy", "attack", "global_batch"),
    [
        ("all-reduce", "ipm", "keep"),
        ("ps-bsp", "label-flip:classes=4", "keep"),
        ("ps-bsp", "label-flip:classes=4", "grow"),
    ],
)
def test_nobody_dies_and_the_bits_are_those_of_the_static_run(
    tmp_path: Path, strategy: str, attack: str, global_batch: str
) -> None:
    found = [
        train(
            tmp_path / name, strategy, "krum:byzantine=1", (attack,), cluster=MANY, global_batch=global_batch, **given
        )
        for name, given in (("elastic", {}), ("static", {"at_least": 0}))
    ]
    assert all(torch.equal(tensor, found[1].model_state()[name]) for name, tensor in found[0].model_state().items())


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
def test_too_few_are_left_for_the_aggregator(tmp_path: Path, strategy: str) -> None:
    """The run ends, and says so; where one worker is trusted, it ends with that one."""

    def cluster(per_hour: float) -> Cluster:
        """A server's host that is gone ends the run: it is to be none of these."""
        workers = replace(MANY.hosts[0], preemptions_per_hour=per_hour, notice_s=0.0)
        return replace(CLUSTER, hosts=(workers, SERVERS_HOSTS), servers=Servers(placement="separate"))

    with pytest.raises(RunFailed, match="3 workers are left, and --elastic asks for 4 or more"):
        train(tmp_path / "few", strategy, "krum:byzantine=1", replacements=0, cluster=cluster(500.0))
    with pytest.raises(RunFailed, match=r"fl-trust.*trusted=0 has sent nothing; those who have are .* more workers"):
        train(tmp_path / "trust", strategy, "fl-trust", at_least=2, cluster=cluster(250.0))


def require_all(result: Result, rounds: Rounds) -> None:
    """Somebody was lost, others came, and each sample counts once an epoch."""
    assert named(result, "lost")
    assert any(event["joined"] for event in named(result, "reformed"))
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES
    each_once(rounds)
