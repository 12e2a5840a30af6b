"""Workers die, come and leave under asynchronous gossip: those who are there meet anew between two steps of their own,
and do what the others' models have nothing of."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.test_elastic import of, trained
from tests.distributed.test_joining import held, joined, meanwhile

pytestmark = pytest.mark.ray
STRATEGY = "ad-psgd:topology=chain"


def require_counted(out: Path, *, epochs: int = 2, samples: int = 96) -> None:
    """Each sample counts once an epoch: of a worker that is gone its first steps do, as far as others have them. A fast
    worker may do in a later epoch what was left of an earlier one."""
    gone = {event["who"]: event["details"]["steps"] for event in of(out, "let_go")}
    counted: Counter[int] = Counter()
    for path in (out.parent / "log").glob("rank-*"):
        for line in path.read_text().splitlines()[: gone.get(f"worker-{path.name[5:]}")]:
            _, _, *index = map(int, line.split())
            counted.update(index)
    assert of(out, "left_over") == []
    assert counted == dict.fromkeys(range(samples), epochs)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == epochs * samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "gone"),
    [
        (["--fail", "1:5:kill"], [1]),
        (["--fail", "0:4:kill", "--fail", "3:7:segfault"], [0, 3]),
        (["--fail-at", "2:3:paceline.training.pauses:Pauses.meet"], [2]),
    ],
    ids=["one", "the first, then another", "coming to a pause"],
)
def test_whoever_dies_each_sample_counts_once(
    tmp_path: Path, ray_here: None, faults: list[str], gone: list[int]
) -> None:
    given = [*faults, "--step-s", 0.02]
    out = trained(tmp_path, *given, workers=4, strategy=STRATEGY, elastic="2:4", eval_every=16)
    assert sorted(event["who"] for event in of(out, "lost")) == [f"worker-{rank}" for rank in gone]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [rank for rank in range(4) if rank not in gone]
    require_counted(out)


@pytest.mark.slow
def test_one_joins_another_dies_and_one_leaves(tmp_path: Path, ray_here: None) -> None:
    given = ["--epochs", 3, *held(8, 40), "--fail", "0:14:kill"]
    with meanwhile(tmp_path, {8: 3, 40: 1}, unrecorded=4):
        out = trained(tmp_path, *given, workers=2, strategy=STRATEGY, elastic="1:3", eval_every=8)
    assert joined(out) == [2]
    assert [event["who"] for event in of(out, "lost")] == ["worker-0"]
    require_counted(out, epochs=3)


@pytest.mark.slow
@pytest.mark.parametrize("gone", [1, 2], ids=["an honest one dies", "the hostile one dies"])
def test_workers_die_and_join_beside_a_hostile_one(tmp_path: Path, ray_here: None, gone: int) -> None:
    """The last of three turns each of its gradients, before and after all have met anew, and nobody else does: not who
    joins, even where the hostile one is dead. What others hear of its model counts as any worker's."""
    given = ["--epochs", 3, "--turned", *held(8), "--fail", f"{gone}:14:kill"]
    with meanwhile(tmp_path, {8: 4}, unrecorded=4, at_start=3):
        out = trained(tmp_path, *given, workers=3, strategy=STRATEGY, elastic="2:4", eval_every=8, attack="sign-flip")
    (told,) = of(out, "attack")
    assert (told["details"]["hostile workers"], told["details"]["who joins"]) == ([2], "honest")
    assert joined(out) == [3]
    assert [event["who"] for event in of(out, "lost")] == [f"worker-{gone}"]
    require_counted(out, epochs=3)
    turned = {int(path.name[7:]): path.read_text().splitlines() for path in (out.parent / "log").glob("turned-*")}
    trained_on = (out.parent / "log" / "rank-2").read_text().splitlines()
    assert turned == {2: [str(step) for step in range(1, 1 + len(trained_on))]}
    assert all(value.isfinite().all() for value in load_file(out / "model.safetensors").values())
