"""The result directory: complete after a run, and a full disk does no harm to what is in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

import paceline
from paceline import ParameterServer, Result, RunFailed
from paceline.checkpoint import Checkpoint
from paceline.records import EvaluationRecord, EventRecord, StepRecord, UpdateRecord
from tests.distributed.harness import TRAIN
from tests.distributed.local import Listener, run_text

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_here")]


def test_result_directory_is_complete(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    script = repository / "train.py"
    script.write_text(TRAIN.read_text() + "\n")
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "A script"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    out = tmp_path / "out"
    listener = Listener()
    paceline.run(
        script, strategy=ParameterServer(consistency="asp", servers=2), workers=2, seed=11, max_steps=40, eval_every=10,
        checkpoint_every=20, out=out, arguments=["--steps", "500"], watcher=listener,
    )  # fmt: skip

    before = [path.name for path in out.glob("checkpoint-*.pt")]
    assert len(before) == 1, "two checkpoints are kept"
    assert {path.name for path in out.iterdir()} == {
        "manifest.json", "steps.csv", "updates.csv", "evaluations.jsonl", "events.jsonl", "model.safetensors",
        "checkpoint.pt", *before,
    }  # fmt: skip
    result = Result.open(out)
    manifest = result.manifest
    assert manifest["program"] == str(script)
    assert manifest["arguments"] == ["--steps", "500"]
    assert manifest["strategy"]["name"] == "ps-asp"
    assert manifest["strategy"]["servers"] == 2
    assert manifest["num_workers"] == 2
    assert manifest["config"]["seed"] == 11
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"]["ray"] == ray.__version__
    assert manifest["git_commit"] == head
    assert manifest["load"]["average_1_min"] >= 0
    assert 0 <= manifest["load"]["used_by_others"] <= 1
    assert manifest["machine"]["num_cores"] == len(os.sched_getaffinity(0))
    assert manifest["command"]

    # Who watches the run hears of every record that is written, in the same order.
    for record_type, written in (
        (StepRecord, result.steps), (UpdateRecord, result.updates), (EvaluationRecord, result.evaluations),
        (EventRecord, result.events),
    ):  # fmt: skip
        heard = [record for record in listener.records if isinstance(record, record_type)]
        assert [record.iteration for record in heard] == [record.iteration for record in written]
        assert len(heard) > 0

    assert result.iteration == 40
    for rank in range(2):
        steps = [step for step in result.steps if step.worker == rank]
        assert [step.step for step in steps] == list(range(1, len(steps) + 1))
        assert all(step.samples == 4 for step in steps)
        assert all(step.time_s > 0 and step.compute_s > 0 for step in steps)
    for server in range(2):
        numbers = [update.iteration for update in result.updates if update.server == server]
        assert numbers == list(range(1, 41)), "every update is recorded once and in order"
    assert [e.iteration for e in result.evaluations][:1] == [0]
    assert result.evaluations[-1].iteration == 40
    assert {"started", "training", "checkpoint"} <= {event.name for event in result.events}
    started = next(event for event in result.events if event.name == "started")
    assert started.details["threads"] == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2
    saved = Checkpoint.decode((out / "checkpoint.pt").read_bytes(), where="checkpoint.pt")
    assert saved.iteration == 40
    model = result.model_state()
    assert model.keys() == saved.model.keys()
    assert all(torch.equal(tensor, saved.model[name]) for name, tensor in model.items())


@pytest.mark.slow
def test_logged_numbers_are_kept(tmp_path: Path) -> None:
    text = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline
worker = paceline.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
for (x,) in loader:
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    worker.log(loss=loss, ten=10)
"""
    result = run_text(tmp_path, text, workers=2)
    tens = [record for record in result.logged if record.name == "ten"]
    assert [(r.worker, r.step, r.value) for r in sorted(tens, key=lambda r: (r.worker, r.step))] == [
        (worker, step, 10.0) for worker in range(2) for step in (1, 2, 3)
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs privileges")
    yield place
    subprocess.run(["umount", str(place)], check=True)


BIG = """
import sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline
from paceline.checkpoint_files import iteration_of
from tests.distributed.harness import wait_until
filler, out = map(Path, sys.argv[1:])
worker = paceline.init()
model = torch.nn.Linear(25_000, 1)  # 100 kB
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(64, 25_000))
model, optimizer, loader = worker.prepare(model, optimizer, DataLoader(data, batch_size=2))
for (x,) in loader:
    if worker.rank == 0 and worker.iteration == 4:
        assert wait_until(lambda: iteration_of(out / "checkpoint.pt") == 4)
        filler.write_bytes(bytes(150_000))
    if worker.rank == 0 and worker.iteration == 9:
        assert wait_until(lambda: (out / "events.jsonl").read_text().count("not_saved") == 2)
        filler.unlink()
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_full_disk_is_said_and_training_goes_on(small_disk: Path, tmp_path: Path) -> None:
    """From iteration 5 to 9 there is no room for another checkpoint; the one before stays, and later ones are kept."""
    script = tmp_path / "script.py"
    script.write_text(BIG)
    out = small_disk / "out"
    listener = Listener()
    result = paceline.run(
        script, workers=1, checkpoint_every=2, keep_checkpoints=1, max_steps=14, out=out, watcher=listener,
        arguments=[str(small_disk / "filler"), str(out)],
    )  # fmt: skip
    assert result.iteration == 14
    saved = [event.iteration for event in result.events if event.name == "checkpoint"]
    failed = [event for event in result.events if event.name == "not_saved"]
    assert [event.iteration for event in failed] == [6, 8]
    assert saved == [2, 4, 10, 12, 14]
    reason = f"cannot write checkpoint.pt: No space left on device in {out}; what was there before is intact"
    assert [event.details["error"] for event in failed] == [reason, reason]
    told = [line for _, line in listener.lines if "is not saved" in line]
    assert told == [
        f"the checkpoint of iteration {iteration} is not saved, and the run goes on: {reason}" for iteration in (6, 8)
    ]
    assert Checkpoint.decode((out / "checkpoint.pt").read_bytes(), where="checkpoint.pt").iteration == 14
    assert not list(out.glob(".*.partial"))


NO_ROOM = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline
worker = paceline.init()
model = torch.nn.Linear(25_000, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = worker.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(4, 25_000))))
while True:
    for (x,) in loader:
        if worker.iteration == 200:
            Path(sys.argv[1]).write_bytes(bytes(250_000))
            os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
        time.sleep(0.01)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_an_interrupted_run_that_cannot_be_saved_has_failed(small_disk: Path, tmp_path: Path) -> None:
    """What started it must not think that it goes on from there."""
    (tmp_path / "script.py").write_text(NO_ROOM)
    command = "import os\nos.environ['LAUNCHER'] = str(os.getpid())\nfrom paceline.cli import main\nmain()\n"
    (tmp_path / "launch.py").write_text(command)
    options = ["run", "script.py", "--out", str(small_disk / "out"), "--", str(small_disk / "filler")]
    done = subprocess.run(
        ["python", "launch.py", *options], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "interrupted, and the last checkpoint is not saved: cannot write checkpoint.pt: No space left" in done.stderr


@pytest.mark.slow
def test_full_disk_under_the_records(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(290_000))
    settings = {"workers": 2, "checkpoint_every": 1_000_000}  # none by time, which would find the disk full first
    with pytest.raises(RunFailed, match=f"cannot write records: No space left on device in {small_disk}/out"):
        paceline.run(TRAIN, out=small_disk / "out", arguments=["--steps", "100000"], watcher=Listener(), **settings)
    assert Result.open(small_disk / "out").steps, "what was written before can be read"


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)"])
def test_what_a_script_has_done_at_exit_is_done(tmp_path: Path, ending: str) -> None:
    """When it ends, as by its own process: with its arguments, and before the run is over."""
    text = f"""
import atexit
import sys
from pathlib import Path

import paceline

worker = paceline.init()
atexit.register(lambda: Path(sys.argv[1], str(worker.rank)).touch())
{ending}
"""
    run_text(tmp_path, text, workers=2, arguments=[str(tmp_path)])
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()
