"""Hostile workers and robust aggregators while real workers die: the model is what one process makes of the steps."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import pieces
from paceline.aggregate import Aggregator, Contribution, join
from paceline.attacks import SentAttack, parse
from paceline.records import UpdateRecord, read_records
from paceline.topology import Ring
from tests import gossip_replay, rounds_replay
from tests.distributed.test_elastic import of, require_each_sample_once, trained
from tests.distributed.test_elastic_gossip import require_replayed as require_mixed
from tests.distributed.test_elastic_rounds import Worker, exchanges_of
from tests.distributed.test_joining import held, joined, meanwhile
from tests.gossip_replay import Replica
from tests.rounds_replay import rounds_of

pytestmark = pytest.mark.ray


Steps = dict[int, dict[int, tuple[list[int], bool]]]
"""By iteration and rank, the samples of the gradients that there were for an update, and whether they count."""


def written_down(out: Path) -> dict[int, list[list[int]]]:
    """Of each rank's steps, the iteration before it and its samples."""
    logs = {int(path.name[5:]): path.read_text().splitlines() for path in (out.parent / "log").glob("rank-*")}
    return {rank: [[*map(int, line.split())][1:] for line in lines] for rank, lines in logs.items()}


def steps_in_common(out: Path) -> Steps:
    """A joiner's first batch is another's, and counts nothing. So is that of who has no samples, which servers' records
    do not name; elsewhere these are the first workers of a step."""
    joined = {rank for event in of(out, "reformed") for rank in event["details"]["joined"]}
    counted = {(each.iteration - 1, each.worker) for each in read_records(out, UpdateRecord)}
    steps: Steps = defaultdict(dict)
    for rank, lines in written_down(out).items():
        for number, (iteration, *index) in enumerate(lines):
            counts = (iteration, rank) in counted if counted else number or rank not in joined
            steps[iteration][rank] = index, bool(counts)
    for each in () if counted else steps.values():
        for rank, (index, _) in each.items():
            later = {i for other, (others, counts) in each.items() if counts and other > rank for i in others}
            if later.issuperset(index):
                each[rank] = index, False
    return steps


class Joining:
    """How what workers send is joined, of whom one may be hostile.

    Args:
        workers: that the run began with.
        knows_all: it is told what honest ones send.
    """

    def __init__(self, aggregate: str, attack: str, *, workers: int, knows_all: bool = True) -> None:
        self.aggregator = pieces.read(Aggregator, aggregate)  # type: ignore[type-abstract]
        (hostile,) = parse([attack])
        assert isinstance(hostile, SentAttack)
        self._hostile, self._workers, self._knows_all = hostile, workers, knows_all

    def sent(self, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """`rows`: of those who have samples."""
        is_hostile = {rank: self._hostile.is_hostile(rank, size=self._workers) for rank in rows}
        honest = torch.stack([row for rank, row in rows.items() if not is_hostile[rank]]).double()
        sent = dict(rows)
        for rank, row in rows.items():
            if is_hostile[rank]:
                own, known = row.double(), honest if self._knows_all else row.double()[None]
                sent[rank] = self._hostile.sent(own, known, size=len(rows), generator=torch.Generator()).float()
        return sent

    def joint(self, rows: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
        sent = self.sent({rank: row for rank, row in rows.items() if weights[rank]})
        given = [
            Contribution(rank, weights[rank], "gradient", [sent.get(rank, row)]) for rank, row in sorted(rows.items())
        ]
        (joint,) = join(self.aggregator, given, [torch.zeros_like(given[0].tensors[0])])
        return joint


def replayed(steps: Steps, joining: Joining, *, optimizer: str = "momentum") -> nn.Module:
    """What one process makes of the same updates."""
    worker = Worker(optimizer)
    model, update = worker.model, worker.optimizer
    for _, each in sorted(steps.items()):
        rows, weights = {}, {}
        for rank, (index, counts) in sorted(each.items()):
            update.zero_grad()
            F.cross_entropy(model(worker.inputs[index]), worker.labels[index]).backward()
            rows[rank] = gradient_of(model)
            weights[rank] = float(counts)
        set_gradient(model, joining.joint(rows, weights))
        update.step()
    return model


def gradient_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])


def set_gradient(model: nn.Module, gradient: Tensor) -> None:
    start = 0
    for parameter in model.parameters():
        parameter.grad = gradient[start : start + parameter.numel()].view(parameter.shape).clone()
        start += parameter.numel()


def require_joined(out: Path, joining: Joining, *, epochs: int, samples: int = 96) -> Steps:
    """Each sample counts in one step, and the model is what one process makes of these. Returns them."""
    steps = steps_in_common(out)
    counted = Counter(i for each in steps.values() for index, counts in each.values() if counts for i in index)
    assert counted == Counter(dict.fromkeys(range(samples), epochs))
    wanted = replayed(steps, joining).state_dict()
    torch.testing.assert_close(load_file(out / "model.safetensors"), wanted, rtol=1e-4, atol=1e-6)
    return steps


@pytest.mark.parametrize(
    ("strategy", "aggregate", "attack"),
    [
        ("all-reduce", "median", "ipm:strength=4"),
        ("ps-bsp", "median", "ipm:strength=4"),
        pytest.param("all-reduce", "trimmed-mean:byzantine=1", "alie", marks=pytest.mark.slow),
    ],
)
def test_an_honest_worker_dies_beside_a_hostile_one(
    tmp_path: Path, ray_here: None, strategy: str, aggregate: str, attack: str
) -> None:
    """With SIGKILL in the middle of a step; under all-reduce those who are left join their gradients of it again."""
    out = trained(
        tmp_path,
        *("--fail", "1:5:kill", "--decay", 1.0),
        workers=4,
        elastic="3:4",
        strategy=strategy,
        options={"aggregate": aggregate},
        attack=attack,
        global_batch="grow",
    )
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    (told,) = of(out, "attack")
    assert (told["details"]["hostile workers"], told["details"]["who joins"]) == ([3], "honest")
    steps = require_joined(out, Joining(aggregate, attack, workers=4, knows_all=strategy != "ps-bsp"), epochs=2)
    assert {len(each) for each in steps.values()} >= {3, 4}


HOSTILE = ["--epochs", 3, "--decay", 1.0, *held(2), "--fail", "1:9:kill"]
"""Of five workers the last one is hostile, another one joins, and one dies."""


@pytest.mark.slow
@pytest.mark.parametrize("global_batch", ["grow", "keep"])
def test_servers_have_enough_gradients_beside_a_hostile_worker(
    tmp_path: Path, ray_here: None, global_batch: str
) -> None:
    with meanwhile(tmp_path, {2: 6}, at_start=5):
        out = trained(
            tmp_path,
            *HOSTILE,
            workers=5,
            elastic="4:6",
            strategy="ps-bsp",
            options={"aggregate": "krum:byzantine=1"},
            attack="ipm:strength=4",
            global_batch=global_batch,
        )
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert [event["who"] for event in of(out, "let_in")] == ["worker-5"]
    steps = steps_in_common(out)
    if global_batch == "keep":  # an iteration may be of several steps
        assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 3 * 96
        assert len(steps) == 3 * 5
        return
    require_joined(out, Joining("krum:byzantine=1", "ipm:strength=4", workers=5, knows_all=False), epochs=3)


class HostileRounds(rounds_replay.Replay):
    """Rounds whose changes are joined so."""

    def __init__(self, strategy: str, joining: Joining) -> None:
        super().__init__(as_replica, rounds_of(strategy))
        self._joining = joining

    def joint(self, rows: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
        return self._joining.joint(rows, weights)


class HostileMixes(gossip_replay.Replay):
    """Models that mix, of which a hostile worker moves its own."""

    def __init__(self, joining: Joining) -> None:
        super().__init__(as_replica, Ring())
        self._joining = joining

    def corrupt(self, weights: Mapping[int, float]) -> None:
        rows = {rank: gradient_of(self.workers[rank].model) / weight for rank, weight in weights.items()}
        for rank, row in self._joining.sent(rows).items():
            set_gradient(self.workers[rank].model, weights[rank] * row)


def as_replica() -> Replica:
    """With one learning rate throughout."""
    made = Worker("momentum")
    return Replica(made.model, made.optimizer, made.inputs, made.labels)


def require_rounds(out: Path, strategy: str, joining: Joining, *, workers: int, epochs: int) -> None:
    """Each sample counts in one round, and the model is what one process makes of these."""
    every = rounds_of(strategy).every
    exchanges = exchanges_of(out, every=every, fragments=1, workers=workers)
    counted = Counter(i for one in exchanges for parts in one.parts.values() for part in parts for i in part)
    assert counted == Counter(dict.fromkeys(range(96), epochs))
    replay = HostileRounds(strategy, joining)
    for one in exchanges:
        replay.exchange(one)
    saved = load_file(out / "model.safetensors")
    for (name, _), own in zip(Worker("momentum").model.named_parameters(), replay.shared, strict=True):
        torch.testing.assert_close(saved[name], own.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_rounds_beside_a_hostile_worker(tmp_path: Path, ray_here: None) -> None:
    strategy = "local-sgd:every=2:aggregate=krum:aggregate.byzantine=1"
    with meanwhile(tmp_path, {2: 6}, at_start=5):
        out = trained(tmp_path, *HOSTILE, workers=5, strategy=strategy, elastic="4:6", attack="ipm:strength=4")
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert joined(out) == [5]
    joining = Joining("krum:byzantine=1", "ipm:strength=4", workers=5)
    require_rounds(out, strategy, joining, workers=5, epochs=3)


@pytest.mark.slow
def test_neighbours_mix_beside_a_hostile_worker(tmp_path: Path, ray_here: None) -> None:
    with meanwhile(tmp_path, {2: 5}, at_start=4):
        out = trained(tmp_path, *HOSTILE, workers=4, strategy="gossip", elastic="3:5", attack="sign-flip")
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert joined(out) == [4]
    require_mixed(out, HostileMixes(Joining("mean", "sign-flip", workers=4)), epochs=3)


@pytest.mark.slow
def test_a_worker_dies_between_the_messages_of_a_joint(tmp_path: Path, ray_here: None) -> None:
    """It has sent its parts to some, and not to others: either all take the joint, or nobody does."""
    sends = "paceline.comm.shared_memory.collective:SharedMemoryCollective.send_bytes"
    out = trained(
        tmp_path,
        "--fail-at",
        f"1:20:{sends}",
        workers=4,
        elastic="3:4",
        strategy="all-reduce",
        options={"aggregate": "median"},
        global_batch="grow",
    )
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    require_each_sample_once(out)
