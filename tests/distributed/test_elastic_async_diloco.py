"""Workers are killed, stopped, leave and join under rounds of a quorum: all servers make the same rounds, of whole
changes, and each sample is in one of them, an epoch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_elastic import of, trained
from tests.distributed.test_elastic_servers import BEFORE_ASKING, meanwhile, told_of, updates
from tests.distributed.test_joining import held, joined

pytestmark = pytest.mark.ray


def strategy(quorum: int) -> str:
    return f"async-diloco:every=3:outer=average:servers=2:quorum={quorum}"


def require_counted(out: Path, *, epochs: int = 2) -> None:
    """Each change once on each server; where each is a round by itself the model tells of which samples."""
    counted = Counter(updates(out))
    assert set(counted.values()) == {1}
    on_each = [{each[1:] for each in counted if each[0] == server} for server in range(2)]
    assert on_each[0] == on_each[1]
    assert not of(out, "left_over")
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == epochs * 96
    if "quorum=1" in json.dumps(json.loads((out / "manifest.json").read_text())):
        for half in load_file(out / "model.safetensors").values():
            assert torch.equal(half, torch.full((96,), float(epochs)))


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
