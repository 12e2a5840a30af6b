"""The checkpoint of the best model: taken when an evaluation finds it, and gone on from bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import nn

import paceline
from paceline.checkpoint import FILE_NAME
from paceline.checkpoint_files import BEST_NAME, iteration_of
from paceline.errors import RunFailed, UsageError
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance.rows import ROWS, Row, prepared, step
from tests.conformance.test_resume import assert_same, checkpoint_in
from tests.conformance.virtual_engine import CLUSTER
from tests.distributed.local import Listener

CHOSEN = [row for row in ROWS if row.name in ("all-reduce", "ps-bsp", "ps-asp")]
SCORES = {3: 0.2, 6: 0.7, 9: 0.9, 12: 0.4, 15: 0.9}
"""By iteration; of later ones the first counts where two are alike."""


def scored(worker: Worker, out: Path) -> None:
    """Of an evaluation that says what it is told."""
    model, optimizer, loader = prepared(worker)

    @worker.evaluation
    def score(model: nn.Module) -> dict[str, float]:
        return {"score": SCORES.get(worker.iteration, 0.3)}

    for _ in range(40):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.name)
def test_the_best_is_kept_and_no_pause_is_missed_for_it(row: Row, tmp_path: Path) -> None:
    """Nobody asked for checkpoints at these iterations."""
    result = row.run(scored, tmp_path / "run", max_steps=18, eval_every=3, keep_best="score", keep_checkpoints=5)
    taken = [event.iteration for event in result.events if event.name == "checkpoint"]
    evaluations = {e.iteration: e.metrics["score"] for e in result.evaluations if e.iteration > 0}
    best, risen = 0.0, []
    for iteration, value in sorted(evaluations.items()):
        if value > best:
            best = value
            risen.append(iteration)
    assert taken == sorted({*risen, result.iteration}), "each that was better than all before, and the end"
    if row.name != "ps-asp":
        assert risen == [3, 6, 9]


def test_the_best_on_the_virtual_engine_and_going_on_from_it(tmp_path: Path) -> None:
    """As `paceline.run` does it, in the same directory and in another one."""
    out = tmp_path / "out"

    def train(**options: object) -> Result:
        return paceline.run(
            _script, strategy="all-reduce", workers=2, engine="virtual", cluster=CLUSTER, eval_every=3,
            keep_best="score", keep_checkpoints=3, **options,
        )  # fmt: skip

    whole = train(max_steps=18, out=out)
    assert (iteration_of(out / BEST_NAME), iteration_of(out / FILE_NAME)) == (9, 18)
    assert {path.name for path in out.glob("*.pt")} == {FILE_NAME, BEST_NAME, "checkpoint-9.pt", "checkpoint-6.pt"}
    end = (out / FILE_NAME).read_bytes()

    shutil.copytree(out, tmp_path / "copy")
    other = train(max_steps=18, out=tmp_path / "other", resume=out, resume_from="best")
    assert min(step.iteration for step in other.steps) == 10
    assert (out / FILE_NAME).read_bytes() == end, "another directory leaves the first as it was"

    again = train(max_steps=18, out=out, resume=out, resume_from=6)
    assert [(step.worker, step.iteration) for step in again.steps] == [
        (step.worker, step.iteration) for step in whole.steps
    ]
    assert_same(checkpoint_in(out), checkpoint_in(tmp_path / "copy"))

    damaged = tmp_path / "copy" / FILE_NAME
    damaged.write_bytes(damaged.read_bytes()[:-9])
    listener = Listener()
    train(max_steps=18, out=damaged.parent, resume=damaged.parent, watcher=listener)
    assert [line.partition(":")[0] for line in listener.of("run")] == [f"{damaged} is no checkpoint, or a damaged one"]
    assert listener.of("run")[0].endswith(f"goes on from {damaged.with_name('checkpoint-9.pt')}, of iteration 9")
    assert_same(checkpoint_in(damaged.parent), checkpoint_in(out))


def _script() -> None:
    scored(paceline.init(), Path())


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="unknown metric of --keep-best 'sore'; did you mean 'score'"):
        CHOSEN[0].run(scored, tmp_path / "sore", max_steps=6, keep_best="sore", eval_every=3)
    with pytest.raises(UsageError, match="--from has no effect without --resume RUN"):
        paceline.run(_script, resume_from="best")
    with pytest.raises(UsageError, match="keep-checkpoints must be positive, not 0"):
        paceline.run(_script, keep_checkpoints=0)
