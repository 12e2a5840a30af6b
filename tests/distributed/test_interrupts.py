"""Ctrl-C and SIGTERM: a run saves itself, says how to go on, and leaves nothing; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import paceline
from paceline import Result
from paceline.records import Record, StepRecord
from tests.distributed.harness import TRAIN, Command, is_training, num_steps, wait_until
from tests.distributed.local import Listener

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


@pytest.mark.usefixtures("ray_here")
def test_an_interrupt_that_python_loses_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _LosesAnInterrupt()
    monkeypatch.setattr(sys, "unraisablehook", listener.note)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="interrupted; saved"):
            paceline.run(
                TRAIN, workers=2, out=tmp_path / "out", watcher=listener,
                arguments=["--steps", "100000", "--step-s", "0.01"],
            )  # fmt: skip
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert listener.lost == [KeyboardInterrupt]


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
