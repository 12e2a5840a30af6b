"""Workers that play clients die, come and leave: each round is that of a run in which nobody does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.running.result import Result
from tests.distributed.test_elastic import SCRIPT, events, of, trained
from tests.distributed.test_joining import held, joined, meanwhile

pytestmark = pytest.mark.ray
ROUNDS = 6
JOINING = "paceline.strategies.federated.joining:Joining"
CLIENTS = "clients=9:fraction=0.67:partition=exponential:partition.ratio=3"
"""Six of nine in a round, of 5 to 16 samples."""
GIVEN = ["--epochs", 100, "--decay", 1]


def undisturbed(directory: Path, strategy: str) -> Result:
    """One process plays all clients, in simulated time."""
    log, out = directory / "undisturbed-log", directory / "undisturbed"
    log.mkdir()
    given = [*map(str, GIVEN), "--log", str(log)]
    settings = {"engine": "virtual", "cluster": "lab-1gbe", "max_steps": ROUNDS}
    return paceline.run(SCRIPT, strategy=strategy, arguments=given, out=out, **settings)


def require_undisturbed(out: Path, strategy: str) -> None:
    """The server's model, what each client keeps, and how many samples there were."""
    wanted = undisturbed(out.parent, strategy)
    private = {"fed-rep": "4."}.get(strategy.partition(":")[0], "nothing")
    own, theirs = (
        {name: tensor for name, tensor in load_file(each / "model.safetensors").items() if not name.startswith(private)}
        for each in (out, wanted.directory)
    )
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)
    kept, kept_there = (_kept(each) for each in (out, wanted.directory))
    torch.testing.assert_close(kept, kept_there, rtol=1e-4, atol=1e-5)
    last, last_there = Result(out).evaluations[-1], wanted.evaluations[-1]
    assert (last.iteration, last.samples) == (ROUNDS, last_there.samples)


def _kept(out: Path) -> dict[str, torch.Tensor]:
    (first, *_) = Checkpoint.decode((out / FILE_NAME).read_bytes(), where="").workers
    return {name: tensor for name, tensor in first.own.items() if name.startswith("client.")}


@pytest.mark.slow
def test_workers_die_at_every_place_of_a_round(tmp_path: Path, ray_here: None) -> None:
    """In a turn; when it has contributed; while it exchanges; when it has the round's result. What each client keeps
    outlives whoever played it last."""
    strategy = f"scaffold:{CLIENTS}"
    faults = [f"3:3:{JOINING}.join", f"1:4:{JOINING}.clear", f"0:9:{JOINING}.add"]
    given = ["--fail", "4:7:kill", *(word for fault in faults for word in ("--fail-at", fault))]
    out = trained(tmp_path, *GIVEN, *given, workers=5, strategy=strategy, elastic="1:5", max_steps=ROUNDS)
    assert sorted(event["who"] for event in of(out, "lost")) == [f"worker-{rank}" for rank in (0, 1, 3, 4)]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [2]
    require_undisturbed(out, strategy)


@pytest.mark.slow
def test_one_joins_and_another_dies_and_a_third_leaves(tmp_path: Path, ray_here: None) -> None:
    strategy = f"fed-rep:{CLIENTS}"
    with meanwhile(tmp_path, {1: 3, 4: 1}):
        out = trained(
            tmp_path, *GIVEN, *held(1, 4), "--fail-at", f"1:3:{JOINING}.join", workers=2, strategy=strategy,
            elastic="1:3", max_steps=ROUNDS,
        )  # fmt: skip
    assert joined(out) == [2]
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert [event["who"] for event in of(out, "left")] == ["worker-2"]
    require_undisturbed(out, strategy)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path, ray_here: None) -> None:
    strategy = f"scaffold:{CLIENTS}"
    out = trained(tmp_path, *GIVEN, "--fail", "1:9:stop", workers=2, strategy=strategy, elastic="1:3", max_steps=3)
    assert "it was silent for" in of(out, "lost")[0]["details"]["why"]
    given = [*map(str, GIVEN), "--log", str(out.parent / "log"), "--fail", "2:4:segfault"]
    paceline.run(SCRIPT, workers=3, arguments=given, resume=out, strategy=strategy, elastic="1:3", max_steps=ROUNDS)
    assert [event["who"] for event in events(out) if event["name"] == "lost"] == ["worker-1", "worker-2"]
    require_undisturbed(out, strategy)
