"""Ctrl-C and SIGTERM: a run saves itself, says how to go on, and leaves nothing; a second one ends it at once."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline import Result
from paceline.engines.ray.letting_go import LettingGo
from paceline.records import Record, StepRecord
from tests.distributed.harness import TRAIN, Command, is_training, num_steps, wait_until
from tests.distributed.local import Listener
from tests.distributed.test_elastic import SCRIPT, of, trained
from tests.distributed.test_elastic_servers import updates

pytestmark = pytest.mark.ray
INTERRUPTED = 130
PATIENT = """
import sys
from paceline.cli import main
from paceline.engines.ray import supervisor
supervisor._SAVE_S = 3600.0
sys.exit(main())
"""
SLOW = pytest.mark.slow


def begin(start, out: Path, strategy: str = "all-reduce", *arguments: object) -> Command:
    command: Command = start(
        "run", TRAIN, "--strategy", strategy, "--workers", 2, "--out", out, *arguments, "--",
        "--step-s", 0.02, "--steps", 100_000, "--loaders", 2, "--child",
    )  # fmt: skip
    return command


@pytest.mark.usefixtures("ray_here")
def test_first_interrupt_saves_and_resume_goes_on(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = begin(start, out, "ps-asp")
    assert wait_until(lambda: num_steps(out))
    command.interrupt()
    output = command.wait()
    assert command.status == INTERRUPTED
    told = [line for line in output.splitlines() if line.startswith("interrupted")]
    assert len(told) == 1
    assert f"--resume {out}" in told[0]
    assert "Traceback" not in output
    assert (out / "checkpoint.pt").exists()
    command.assert_nothing_left()
    saved = Result.open(out).iteration
    assert f"saved at iteration {saved} in {out}" in told[0]

    result = paceline.run(
        TRAIN, strategy="ps-asp", workers=2, resume=out, out=out, max_steps=saved + 20, watcher=Listener(),
        arguments=["--steps", "100000"],
    )  # fmt: skip
    assert result.iteration == saved + 20
    assert (out / "model.safetensors").exists()
    for rank in range(2):
        steps = [record.step for record in result.steps if record.worker == rank]
        assert steps == list(range(1, len(steps) + 1)), f"worker {rank} lost or repeated a step"


class _LosesAnInterrupt(Listener):
    """Has a Ctrl-C arrive inside of a finalizer, where Python throws away what its handler raises."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[object] = []

    def on_records(self, records: Sequence[Record]) -> None:
        super().on_records(records)
        if not self.lost and any(isinstance(record, StepRecord) for record in records):
            _Finalized()

    def note(self, unraisable: sys.UnraisableHookArgs) -> None:
        self.lost.append(unraisable.exc_type)


class _Finalized:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """As in a process of its own: a test may run in the background of a shell, which has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.usefixtures("ray_here", "interrupts")
def test_an_interrupt_that_python_loses_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _LosesAnInterrupt()
    monkeypatch.setattr(sys, "unraisablehook", listener.note)
    with pytest.raises(KeyboardInterrupt, match="interrupted; saved"):
        paceline.run(
            TRAIN, workers=2, out=tmp_path / "out", watcher=listener,
            arguments=["--steps", "100000", "--step-s", "0.01"],
        )  # fmt: skip
    assert listener.lost == [KeyboardInterrupt]


def interrupt_as_servers_are_asked(monkeypatch: pytest.MonkeyPatch, *, number: int, times: int) -> list[int]:
    """Before they are asked for the so-manieth time about a worker that is gone; gives the numbers of what they were
    asked."""
    ask, asked, numbers = LettingGo._ask, list[int](), itertools.count(1)

    def interrupted(self: LettingGo, *given: Any) -> list[Any]:
        asked.append(next(numbers))
        for _ in range(times if asked[-1] == number else 0):
            signal.raise_signal(signal.SIGINT)
        return ask(self, *given)

    monkeypatch.setattr(LettingGo, "_ask", interrupted)
    return asked


COUNTS = {"strategy": "ps-asp", "options": {"servers": 2}, "elastic": "1:3"}
"""Each gradient takes one from an element of the model for each of its samples, on each of two servers."""


@SLOW
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.usefixtures("ray_here", "interrupts")
def test_an_interrupt_while_a_worker_is_let_go_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Before the servers know of it, or when one of two has let it go: the run saves itself with what both know, and
    two workers go on from there, with what the dead one has left, too."""
    asked = interrupt_as_servers_are_asked(monkeypatch, number=number, times=1)
    given = ["--tally", "--epochs", 3, "--step-s", 0.02]
    with pytest.raises(KeyboardInterrupt, match="interrupted; saved at iteration"):
        trained(tmp_path, "--fail", "1:5:kill", *given, **COUNTS)
    assert asked == [1, 2, 3]
    out, again, log = tmp_path / "out", tmp_path / "again", tmp_path / "log-again"
    assert [[event["who"] for event in of(out, name)] for name in ("lost", "let_go")] == [["worker-1"]] * 2
    log.mkdir()
    arguments = [*map(str, given), "--log", str(log)]
    paceline.run(SCRIPT, workers=2, resume=out, out=again, arguments=arguments, watcher=Listener(), **COUNTS)
    for half in load_file(again / "model.safetensors").values():
        assert torch.equal(half, torch.full((96,), 3.0))
    assert len(updates(out)) + len(updates(again)) == 2 * 72


@SLOW
@pytest.mark.usefixtures("ray_here", "interrupts")
def test_a_second_interrupt_while_a_worker_is_let_go_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the servers again, which may be what the run waits for."""
    asked = interrupt_as_servers_are_asked(monkeypatch, number=2, times=2)
    with pytest.raises(KeyboardInterrupt, match="interrupted before anything was saved"):
        trained(tmp_path, "--fail", "1:5:kill", "--step-s", 0.02, **COUNTS)
    assert asked == [1, 2]
    assert [event["who"] for event in of(tmp_path / "out", "lost")] == ["worker-1"]
    assert len(of(tmp_path / "out", "interrupted")) == 1


@SLOW
def test_second_interrupt_ends_at_once(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # A hanging worker cannot save, so that the first interrupt is still waited for, here for as long as it takes.
    patient = tmp_path / "patient.py"
    patient.write_text(PATIENT)
    command = start(
        "run", TRAIN, "--workers", 2, "--out", out, "--",
        "--fault", "hang", "--step", 3, "--child", "--results", out, program=str(patient),
    )  # fmt: skip
    assert wait_until((out / "struck").exists)
    assert wait_until(lambda: is_training(out))
    command.interrupt()
    time.sleep(1.0)
    assert command.process.poll() is None
    command.interrupt()
    output = command.wait()
    assert command.status == INTERRUPTED
    assert "interrupted before anything was saved" in output
    assert "Traceback" not in output
    command.assert_nothing_left()


@SLOW
def test_one_sigterm_to_a_run_that_cannot_save(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = start("run", TRAIN, "--workers", 2, "--out", out, "--", "--fault", "hang", "--step", 3, "--results", out)
    assert wait_until((out / "struck").exists)
    os.kill(command.process.pid, signal.SIGTERM)
    output = command.wait()
    assert command.status == INTERRUPTED
    assert "interrupted before anything was saved" in output
    command.assert_nothing_left()


def test_interrupt_during_start_up(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = begin(start, out)
    # The result directory is made right before Ray is started.
    assert wait_until(lambda: (out / "manifest.json").exists())
    time.sleep(0.5)
    assert not is_training(out)
    command.interrupt()
    output = command.wait()
    assert command.status == INTERRUPTED
    assert "Traceback" not in output
    told = "interrupted before any step that the run knows of; give the same command again, with another --out than"
    assert f"{told} {out}" in output
    command.assert_nothing_left()
