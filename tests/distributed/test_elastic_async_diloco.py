"""Workers are killed, stopped, leave and join under rounds of a quorum: all servers make the same rounds, of whole
changes, and each sample is in one of them, an epoch."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.records import UpdateRecord, read_records
from tests.distributed.test_elastic import of, trained
from tests.distributed.test_elastic_servers import BEFORE_ASKING, meanwhile, told_of, updates
from tests.distributed.test_joining import held, joined

pytestmark = pytest.mark.ray


def strategy(quorum: int) -> str:
    return f"async-diloco:every={EVERY}:outer=average:servers=2:quorum={quorum}"


EVERY, SAMPLES = 3, 96


def changes(out: Path, *, until: float = math.inf) -> dict[int, list[list[int]]]:
    """By round up to this one, the samples of each change in it: of so many steps of its worker, or of fewer where that
    has left. What a worker has trained on since is in none."""
    rows = [each for each in read_records(out, UpdateRecord) if each.server == 0]
    found: dict[int, list[list[int]]] = defaultdict(list)
    for rank in {each.worker for each in rows}:
        steps = [line.split()[2:] for line in (out.parent / "log" / f"rank-{rank}").read_text().splitlines()]
        own = sorted((each for each in rows if each.worker == rank), key=lambda each: each.clock)
        for number, each in enumerate(own):
            if each.iteration <= until:
                of_change = steps[EVERY * number : EVERY * (number + 1)]
                found[each.iteration].append([int(index) for step in of_change for index in step])
    return found


def require_same_changes(out: Path) -> None:
    """On both servers, each once."""
    counted = Counter(updates(out))
    assert set(counted.values()) == {1}
    on_each = [{each[1:] for each in counted if each[0] == server} for server in range(2)]
    assert on_each[0] == on_each[1]
    assert not of(out, "left_over")


def require_counted(out: Path, *, epochs: int = 2, before: Path | None = None) -> None:
    """And the model, which takes the mean of a round's changes, tells of which samples these are. `before`: the run
    that this one goes on from, at its last checkpoint."""
    require_same_changes(out)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == epochs * SAMPLES
    rounds = [*changes(out).values()]
    if before is not None:
        rounds += changes(before, until=of(before, "checkpoint")[-1]["iteration"]).values()
    assert Counter(index for some in rounds for change in some for index in change) == dict.fromkeys(
        range(SAMPLES), epochs
    )
    wanted = torch.zeros(SAMPLES)
    for some in rounds:
        for change in some:
            wanted += torch.bincount(torch.tensor(change), minlength=SAMPLES) / len(some)
    for half in load_file(out / "model.safetensors").values():
        torch.testing.assert_close(half, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quorum", "faults", "gone"),
    [
        (1, ["--fail", "1:5:kill"], [1]),
        (1, ["--fail-at", f"1:12:{BEFORE_ASKING}"], [1]),
        (1, ["--fail-at", f"1:13:{BEFORE_ASKING}"], [1]),
        (1, ["--fail-at", f"0:14:{BEFORE_ASKING}", "--fail", "2:8:segfault"], [0, 2]),
        (2, ["--fail-at", f"1:10:{BEFORE_ASKING}"], [1]),
        (1, ["--fail", "2:7:stop"], [2]),
    ],
    ids=[
        "in its steps",
        "before it tells the other",
        "before it pushes",
        "two, the first of them",
        "of two",
        "stopped",
    ],
)
def test_whoever_dies_each_change_counts_whole(tmp_path: Path, ray_here: None, quorum: int, faults, gone) -> None:
    out = trained(
        tmp_path, "--tally", *faults, "--step-s", 0.02, strategy=strategy(quorum), elastic=f"{quorum}:3", eval_every=4
    )
    assert sorted(event["who"] for event in told_of(out)["lost"]) == [f"worker-{rank}" for rank in gone]
    require_counted(out)


@pytest.mark.slow
def test_one_joins_and_leaves(tmp_path: Path, ray_here: None) -> None:
    """Steps take so long that the one who is asked to leave hears of it before the data are done."""
    turns = [(3, 3, {"ready": 1}), (8, None, {"let_in": 1}), (14, 2, {})]
    with meanwhile(tmp_path, *turns):
        out = trained(
            tmp_path, "--tally", "--epochs", 4, "--step-s", 0.1, *held(3, 8, 14), workers=2, strategy=strategy(1),
            elastic="1:3", eval_every=6, checkpoint_every=6,
        )  # fmt: skip
    assert joined(out) == [2]
    assert [event["who"] for event in of(out, "left")] == ["worker-2"]
    assert of(out, "let_go")[0]["details"]["steps"] > 0
    require_counted(out, epochs=4)
