"""Workers die, stop, come and leave under gossip: those who are there repeat an exchange that somebody has missed,
every sample counts in one, and one process makes the same model of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.outer import Momentum
from paceline.topology import Chain, OnePeerExponential, RandomPairs, Ring
from tests.distributed.test_elastic import of, trained
from tests.distributed.test_elastic_rounds import Step, Worker, require_each_sample_once, rounds_of
from tests.distributed.test_joining import held, joined, meanwhile
from tests.gossip_replay import Batch, Replay, Replica

pytestmark = pytest.mark.ray
EXCHANGE = "paceline.strategies.gossip.synchronizer:GossipSynchronizer"
LINKS = "paceline.strategies.gossip.links:Links"


def make() -> Replica:
    worker = Worker("momentum")
    return Replica(worker.model, worker.optimizer, worker.inputs, worker.labels, worker.scheduler)


def require_replayed(out: Path, replay: Replay, *, epochs: int = 2) -> None:
    """Deaths are to be in exchanges in which all have as many samples: the others' had their weights before."""
    require_each_sample_once(out, epochs=epochs)
    changes = {event["details"]["step"]: event["details"] for event in of(out, "reformed")}
    epoch = 1
    for number, parts in enumerate(rounds_of(out)):
        change = changes.get(number, {"epoch": epoch, "joined": []})
        epoch = change["epoch"]
        replay.exchange({**weighed(parts), **{rank: [] for rank in change["joined"]}}, epoch=epoch)
    saved = load_file(out / "model.safetensors")
    own = torch.cat([saved[name].reshape(-1) for name, _ in make().model.named_parameters()])
    torch.testing.assert_close(own, replay.mean(), rtol=1e-4, atol=1e-6)


def weighed(parts: dict[int, list[Step]]) -> dict[int, list[Batch]]:
    """Each batch by its share of what all have in that step, as it was handed out."""
    means = [sum(map(len, indices)) / len(indices) for indices in step_by_step(parts)]
    return {
        rank: [(index, len(index) / mean) for (_, index), mean in zip(steps, means, strict=False)]
        for rank, steps in parts.items()
    }


def step_by_step(parts: dict[int, list[Step]]) -> list[list[list[int]]]:
    """Of each step, the samples of those who have made it."""
    length = max(map(len, parts.values()))
    return [[steps[step][1] for steps in parts.values() if step < len(steps)] for step in range(length)]


@pytest.mark.parametrize(
    ("strategy", "replay", "faults", "gone"),
    [
        ("gossip", Replay(make, Ring()), ["--fail", "1:5:kill"], [1]),
        ("gossip:order=awc", Replay(make, Ring(), order="awc"), ["--fail", "0:3:kill", "--fail", "2:6:kill"], [0, 2]),
        ("gossip", Replay(make, Ring()), ["--fail", "2:4:kill", "--fail", "3:4:kill"], [2, 3]),
        ("sgp", Replay(make, OnePeerExponential(), mode="push-sum"), ["--fail", "1:4:stop"], [1]),
        ("relay", Replay(make, Chain(), mode="relay"), ["--fail", "0:4:segfault"], [0]),
        (
            "gossip",
            Replay(make, Ring()),
            ["--fail-at", f"3:2:{LINKS}.start", "--fail-at", f"1:4:{LINKS}.wait", "--fail-at", f"0:5:{EXCHANGE}._mix"],
            [0, 1, 3],
        ),
    ],
    ids=["one", "the first, then another", "two at once", "stopped", "the first of a chain", "in an exchange"],
)
@pytest.mark.slow
def test_whoever_dies_the_model_is_the_replayed_one(tmp_path, ray_here, strategy, replay, faults, gone) -> None:
    out = trained(tmp_path, *faults, workers=4, strategy=strategy, elastic="1:4", eval_every=3)
    assert sorted(event["who"] for event in of(out, "lost")) == [f"worker-{rank}" for rank in gone]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [rank for rank in range(4) if rank not in gone]
    require_replayed(out, replay)


@pytest.mark.slow
def test_one_joins_another_dies_and_one_leaves(tmp_path: Path, ray_here: None) -> None:
    given = ["--epochs", 3, *held(2, 12), "--fail", "0:8:kill"]
    with meanwhile(tmp_path, {2: 3, 12: 1}):
        out = trained(tmp_path, *given, workers=2, strategy="gossip", elastic="1:3")
    assert joined(out) == [2]
    assert [event["who"] for event in of(out, "lost")] == ["worker-0"]
    assert [event["who"] for event in of(out, "left")] == ["worker-2"]
    require_replayed(out, Replay(make, Ring()), epochs=3)


@pytest.mark.slow
def test_exchanges_of_several_steps(tmp_path: Path, ray_here: None) -> None:
    """An exchange after three steps, and at the end of a pass. Another worker has joined when one dies in the second
    step of its round."""
    given = ["--epochs", 3, *held(3), "--fail", "1:11:kill"]
    with meanwhile(tmp_path, {3: 3}):
        out = trained(tmp_path, *given, workers=2, strategy="noloco:every=3", elastic="1:3")
    assert joined(out) == [2]
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    outer = Momentum(lr=0.7, momentum=0.5)
    require_replayed(out, Replay(make, RandomPairs(), mode="outer", every=3, outer=outer), epochs=3)
