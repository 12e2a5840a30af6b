"""`paceline probe` on this machine, and what becomes of it when something is wrong.

All are slow: tests/unit/test_probing*.py have the command, its steps and its network in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.cluster.reading import load
from tests.distributed.harness import TRAIN, Command, wait_until
from tests.distributed.local import Listener

pytestmark = [pytest.mark.ray, pytest.mark.slow]
DEMO = Path(paceline.__file__).with_name("demo_script.py")


def test_a_probe_of_this_machine_is_a_cluster_to_simulate(start: Callable[..., Command], tmp_path: Path) -> None:
    command = start("probe", DEMO, "--steps", "10", "--out", "here.toml", "--", "--batch-size", "16")
    said = command.wait()
    assert command.status == 0, said
    assert "2/3 steps of demo_script.py on 1 host(s), a worker each" in said
    assert "Wrote here.toml" in said
    command.assert_nothing_left()
    cluster = load(tmp_path / "here.toml")
    assert cluster.num_hosts == 1
    assert cluster.compute.step_s is not None
    assert 1e-5 < cluster.compute.step_s < 1.0
    assert 0.05 < cluster.compute.backward_share < 0.95
    assert len(cluster.compute.trace_s) >= 8
    num_steps = len(cluster.compute.trace_s)
    result = paceline.run(
        DEMO, strategy="single", workers=1, engine="virtual", cluster=cluster, max_steps=num_steps,
        out=tmp_path / "run", watcher=Listener(),
    )  # fmt: skip
    # One worker computes as it did when it was probed, the whole trace once. A batch of 32 takes twice as long as one
    # of 16 only if it is not the first that the run sees, which sets what a step is. What exchanges take is left out:
    # on a busy machine they are probed as anything.
    assert result.training_time_s == pytest.approx(num_steps * cluster.compute.step_s, rel=1e-3)


def test_a_script_that_fails_is_named_and_no_file_is_written(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise KeyError('images')\n")
    command = start("probe", "bad.py")
    said = command.wait()
    assert command.status == 1
    assert f"probing ended in the script {tmp_path / 'bad.py'}: worker 0" in said
    assert "KeyError: 'images'" in said
    assert not (tmp_path / "cluster.toml").exists()
    command.assert_nothing_left()


def test_an_interrupt_leaves_nothing_behind(start: Callable[..., Command], tmp_path: Path) -> None:
    command = start("probe", TRAIN, "--steps", "100000", "--max-time", "600", "--", "--step-s", "0.01")
    assert wait_until(lambda: "2/3" in _said(command))
    command.interrupt()
    said = command.wait()
    assert command.status == 130
    assert "interrupted; nothing was written" in said
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("output-")] == []
    command.assert_nothing_left()


def _said(command: Command) -> str:
    return next(command.directory.glob(f"output-{command.tag}")).read_text()
