"""A script fails on one rank: one error, with the script's own traceback, who and when; the others stay silent."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import safetensors.torch

import paceline
from paceline import Result, RunFailed, UsageError
from paceline.checkpoint import Checkpoint
from tests.distributed.harness import TRAIN, pids
from tests.distributed.local import Listener, run_text

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_here")]
SLOW = pytest.mark.slow


def train(tmp_path: Path, fault: str, *arguments: object, workers: int = 2, **options: Any) -> Result:
    return paceline.run(
        TRAIN,
        workers=workers,
        arguments=[str(a) for a in ("--fault", fault, "--results", tmp_path / "out", *arguments)],
        out=tmp_path / "out",
        watcher=Listener(),
        **options,
    )


def failure(tmp_path: Path, fault: str, *arguments: object, kind: type[Exception] = RunFailed, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        train(tmp_path, fault, *arguments, **options)
    return str(caught.value)


def test_a_late_start_names_the_option_that_gives_more_time(tmp_path: Path) -> None:
    message = failure(tmp_path, "none", start_deadline_s=1e-6)
    assert re.match(r"worker-\d.* did not start within 1e-06 s; .* --start-deadline SECONDS", message), message


@pytest.mark.parametrize(("strategy", "workers"), [("all-reduce", 2), pytest.param("ps-asp", 3, marks=SLOW)])
def test_exception_is_shown_once_with_the_scripts_frames(tmp_path: Path, strategy: str, workers: int) -> None:
    message = failure(tmp_path, "raise", "--rank", 1, "--step", 5, strategy=strategy, workers=workers)
    assert message.startswith(f"worker 1 (process {pids(tmp_path / 'out')['worker-1']}) failed after step 4: ")
    assert message.splitlines()[0].endswith("ValueError: broken on purpose")
    assert message.count("Traceback") == 1
    assert message.count("broken on purpose") == 3  # the first line, the line of code, the last line
    frames = re.findall(r'File "([^"]+)"', message)
    assert frames == [str(TRAIN), str(TRAIN)]
    assert "worker 0" not in message
    assert "worker 2" not in message


@SLOW
def test_exception_in_the_evaluation(tmp_path: Path) -> None:
    message = failure(tmp_path, "raise-in-evaluation", eval_every=10)
    assert message.splitlines()[0].startswith("worker 0 ")
    assert message.rstrip().endswith("ArithmeticError: the evaluation broke on purpose")
    files = set(re.findall(r'File "([^"]+)"', message))
    assert {file for file in files if "/torch/" not in file} == {str(TRAIN)}


@SLOW
def test_exception_in_a_data_loader_process(tmp_path: Path) -> None:
    message = failure(tmp_path, "raise-in-loader", "--loaders", 2)
    assert re.match(r"worker \d \(process \d+\) failed after step \d+: LookupError: Caught LookupError", message)
    assert "the loader broke on purpose" in message
    assert str(TRAIN) in message


@SLOW
def test_exit_with_a_status(tmp_path: Path) -> None:
    message = failure(tmp_path, "exit", "--rank", 0, "--step", 3)
    assert re.fullmatch(r"worker 0 \(process \d+\) failed after step 2: the script ended with sys.exit\(3\)", message)


@SLOW
def test_os_exit_counts_as_a_death(tmp_path: Path) -> None:
    message = failure(tmp_path, "vanish", "--rank", 1, "--step", 5)
    assert re.fullmatch(r"worker 1 \(process \d+\) died during step 5", message)


@SLOW
def test_import_error(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        run_text(tmp_path, "import no_such_module\n", workers=2)
    message = str(caught.value)
    assert re.match(r"worker [01] ", message)
    assert "failed after step 0: ModuleNotFoundError: No module named 'no_such_module'" in message
    assert message.count("Traceback") == 1
    assert re.findall(r'File "([^"]+)"', message) == [str(tmp_path / "script.py")]
    assert "import no_such_module" in message


def test_output_says_who_printed_it_and_nothing_is_lost(tmp_path: Path) -> None:
    listener = Listener()
    text = """
import os, sys
import paceline
worker = paceline.init()
for number in range(20000):
    print(f"line {number} of {worker.rank}")
print("to stderr", file=sys.stderr)
os.system("echo from a child")
os.write(1, b"from below Python\\n")
print("over\\rand over\\rwritten")
print("without an end", end="")
"""
    began_s = time.monotonic()
    run_text(tmp_path, text, workers=2, listener=listener)
    print(f"{time.monotonic() - began_s:.1f} s for 40,000 lines")
    for rank in range(2):
        lines = listener.of(f"worker-{rank}")
        assert lines[:20000] == [f"line {number} of {rank}" for number in range(20000)]
        assert sorted(lines[20000:]) == [
            "from a child", "from below Python", "to stderr", "without an end", "written",
        ]  # fmt: skip


@SLOW
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("other-shape", r"rank 0 has 0.weight of shape \[16, 8\].* rank 1 has 0.weight of shape \[17, 8\]"),
        ("other-dtype", r"2.weight .*float32.* rank 1 has 2.weight .*float64"),
    ],
)
def test_mismatched_models_are_refused(tmp_path: Path, fault: str, named: str) -> None:
    message = failure(tmp_path, fault, "--rank", 1, strategy="ps-bsp" if fault == "other-shape" else "all-reduce")
    assert re.search(named, message)
    assert "Traceback" not in message
    assert "\n" not in message


@SLOW
def test_mismatched_tensors_in_a_collective(tmp_path: Path) -> None:
    text = """
import torch
import paceline
worker = paceline.init()
worker.all_reduce(torch.zeros(3 + worker.rank))
"""
    with pytest.raises(RunFailed, match=r"rank 0 asks for .*3 elements of float32, rank 1 for .*4 elements of float32"):
        run_text(tmp_path, text, workers=2)


@SLOW
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
def test_nonfinite_gradient_is_reported_and_the_servers_stay_finite(tmp_path: Path, strategy: str) -> None:
    message = failure(tmp_path, "nan", "--rank", 1, "--step", 4, strategy=strategy, checkpoint_every=1)
    assert re.fullmatch(
        r"worker 1 \(process \d+\) failed after step 3: step 4: the gradient of parameter '0.weight' on rank 1 "
        r"is not finite; .* --option nonfinite=skip .*",
        message,
    )
    raw = (tmp_path / "out" / "checkpoint.pt").read_bytes()
    assert all(tensor.isfinite().all() for tensor in Checkpoint.decode(raw, where="checkpoint.pt").model.values())


@SLOW
def test_nonfinite_gradient_in_the_first_step_names_the_rank_it_came_from(tmp_path: Path) -> None:
    # In its first step ps-bsp averages gradients among workers, after which all have the NaN.
    message = failure(tmp_path, "nan", "--rank", 1, "--step", 1, strategy="ps-bsp", workers=3)
    assert re.match(r"worker 1 \(process \d+\) failed after step 0: step 1: .*'0.weight' on rank 1 is not", message)


@SLOW
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
def test_nonfinite_gradients_can_be_skipped(tmp_path: Path, strategy: str) -> None:
    result = train(
        tmp_path, "inf", "--rank", 1, "--step", 4, strategy=strategy, options={"nonfinite": "skip"}, max_steps=30
    )
    assert result.iteration == 30
    assert result.metrics["finite"] == 1.0
    weights = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    if strategy in ("all-reduce", "ps-bsp"):
        assert len([step for step in result.steps if step.worker == 1]) == 31


@pytest.mark.parametrize("strategy", ["ps-bsp"])
def test_hanging_rank_is_named(tmp_path: Path, strategy: str) -> None:
    message = failure(tmp_path, "hang", "--rank", 1, "--step", 5, strategy=strategy, deadline_s=15.0)
    started = [event for event in (tmp_path / "out" / "events.jsonl").read_text().splitlines() if "training" in event]
    assert started
    assert message.startswith(f"worker 1 (process {pids(tmp_path / 'out')['worker-1']}) hangs after step 4; worker 0 ")
    assert "15 s" in message.split("hangs after step 4")[1]
    assert "Traceback" not in message


@SLOW
def test_a_finished_worker_does_not_wait_for_a_hung_one(tmp_path: Path) -> None:
    settings = {
        "strategy": "ps-asp",
        "workers": 3,
        "deadline_s": 6.0,
        "checkpoint_every": 1_000_000,
    }  # no pause in which they would wait
    message = failure(tmp_path, "hang", "--rank", 1, "--step", 5, "--steps", 40, **settings)
    took_s = time.time() - (tmp_path / "out" / "struck").stat().st_mtime
    print(f"{took_s:.1f} s from the last step of the one that hangs")
    assert re.fullmatch(
        rf"worker 1 \(process {pids(tmp_path / 'out')['worker-1']}\) hangs after step 4: no step for 6 s, while the "
        r"others are done and wait; see what keeps it, or give a longer --deadline",
        message,
    )


@SLOW
def test_a_finished_worker_waits_for_a_slow_one(tmp_path: Path) -> None:
    """As long as each of its steps takes less than the deadline."""
    result = train(tmp_path, "slow", "--rank", 1, "--steps", 12, strategy="ps-asp", deadline_s=6.0)
    took_s = [max(record.time_s for record in result.steps if record.worker == rank) for rank in range(2)]
    assert took_s[1] - took_s[0] > 6.0
    assert result.iteration == 24


def test_another_cluster_than_the_connected_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is connected to Ray at .*, not at 192\.0\.2\.99:6379; call ray\.shutdown"):
        train(tmp_path, "none", address="192.0.2.99:6379")
    own = ray.get_runtime_context().gcs_address
    assert train(tmp_path / "own", "none", address=own, workers=1, max_steps=2).iteration == 2


@SLOW
def test_target_metric_that_only_running_shows_unknown_is_refused_before_training(tmp_path: Path) -> None:
    text = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline
worker = paceline.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
worker.evaluation(lambda model: {"loss": 1.0})
for (x,) in loader:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""
    with pytest.raises(UsageError, match="unknown target metric 'los'; did you mean 'loss'"):
        run_text(tmp_path, text, target="los<=0.1")
    assert Result.open(tmp_path / "out").steps == []
