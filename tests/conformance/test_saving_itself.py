"""A script that has checkpoints of its own: the run writes none, and says how the script goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.checkpoint import FILE_NAME
from paceline.engines.ray.interrupts import Interrupted
from paceline.engines.standing import Progress
from paceline.errors import RunFailed
from paceline.records import EventRecord, read_records
from tests.conformance import local_engine
from tests.conformance.rows import prepared, step


def script() -> None:
    worker = paceline.init()
    worker.saves_itself("run it again with --load it")
    worker.saves_itself("run it again with --load it")
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)


def test_the_run_saves_nothing_and_says_how_to_go_on(tmp_path: Path) -> None:
    local_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)
    assert not (tmp_path / FILE_NAME).exists()
    assert (tmp_path / "model.safetensors").exists()
    progress = Progress()
    progress.take(read_records(tmp_path, EventRecord))
    said = str(Interrupted(tmp_path, how=progress.how_to_go_on))
    assert said == "interrupted; this script saves by itself: run it again with --load it"


GIVEN: list[dict[str, Any]] = [
    {"checkpoint_every": 2},
    {"keep_best": "loss"},
    {"copy_checkpoints": "memory://copies-of-a-script-that-saves-itself"},
]


@pytest.mark.parametrize("settings", GIVEN, ids=str)
def test_what_is_for_other_checkpoints_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="is for Paceline's checkpoints, and this script has its own; run it again"):
        local_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path, **settings)


def said_by_one() -> None:
    worker = paceline.init()
    if worker.rank == 1:
        worker.saves_itself("by --load it")
    prepared(worker)


def said_twice() -> None:
    worker = paceline.init()
    worker.saves_itself("by --load it")
    worker.saves_itself("by another way")


def said_late() -> None:
    worker = paceline.init()
    prepared(worker)
    worker.saves_itself("by --load it")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (said_by_one, "saves_itself: rank 0 said '' and rank 1 'by --load it'; have all say the same"),
        (said_twice, r"saves_itself\('by another way'\): .* say it once; it was 'by --load it' before"),
        (said_late, "saves_itself came after prepare"),
    ],
)
def test_workers_that_disagree_are_told(program: Callable[[], None], said: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=said):
        local_engine.run(program, strategy="all-reduce", workers=2, out=tmp_path)
