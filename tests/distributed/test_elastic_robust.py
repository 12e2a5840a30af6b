"""Hostile workers and robust aggregators while real workers die: the model is what one process makes of the steps."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import pieces
from paceline.aggregate import Aggregator, Contribution
from paceline.attacks import SentAttack, parse
from paceline.records import UpdateRecord, read_records
from tests.distributed.test_elastic import OPTIMIZERS, of, require_each_sample_once, trained

pytestmark = pytest.mark.ray


Steps = dict[int, dict[int, list[int]]]
"""By iteration and rank, the samples of the gradients that an update was made of."""


def written_down(out: Path) -> dict[int, list[list[int]]]:
    """Of each rank's steps, the iteration before it and its samples."""
    logs = {int(path.name[5:]): path.read_text().splitlines() for path in (out.parent / "log").glob("rank-*")}
    return {rank: [[*map(int, line.split())][1:] for line in lines] for rank, lines in logs.items()}


def steps_in_common(out: Path) -> Steps:
    steps: Steps = defaultdict(dict)
    for rank, lines in written_down(out).items():
        for iteration, *index in lines:
            steps[iteration][rank] = index
    return steps


def served_updates(out: Path) -> Steps:
    """As the server's records say: of each worker's clocks its steps are the first, the second and so on."""
    lines, steps = written_down(out), defaultdict(dict)
    for record in read_records(out, UpdateRecord):
        steps[record.iteration][record.worker] = lines[record.worker][record.clock][1:]
    return steps


def replayed(steps: Steps, aggregate: str, attack: str, *, workers: int, knows_all: bool) -> nn.Module:
    """What one process makes of the same updates."""
    aggregator = pieces.read(Aggregator, aggregate)  # type: ignore[type-abstract]
    (hostile,) = parse([attack])
    assert isinstance(hostile, SentAttack)
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(96, 8, generator=generator), torch.randint(0, 3, (96,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for _, each in sorted(steps.items()):
        rows: dict[int, Tensor] = {}
        for rank, index in sorted(each.items()):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[index]), labels[index]).backward()
            rows[rank] = nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])
        honest = torch.stack([row for rank, row in rows.items() if not hostile.is_hostile(rank, size=workers)]).double()
        given = []
        for rank, row in rows.items():
            if hostile.is_hostile(rank, size=workers):
                own = row.double()
                known = honest if knows_all else own[None]
                row = hostile.sent(own, known, size=len(rows), generator=torch.Generator()).float()
            given.append(Contribution(rank, 1.0, "gradient", [row]))
        (joint,) = aggregator.aggregate(given, [torch.zeros_like(given[0].tensors[0])])
        start = 0
        for parameter in model.parameters():
            parameter.grad = joint[start : start + parameter.numel()].view(parameter.shape).clone()
            start += parameter.numel()
        optimizer.step()
    return model


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
    require_each_sample_once(out)
    is_served = strategy == "ps-bsp"
    steps = served_updates(out) if is_served else steps_in_common(out)
    assert {len(each) for each in steps.values()} >= {3, 4}
    model = replayed(steps, aggregate, attack, workers=4, knows_all=not is_served)
    torch.testing.assert_close(load_file(out / "model.safetensors"), model.state_dict(), rtol=1e-4, atol=1e-6)


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
