"""Workers die or stop, and the others go on: no step is lost, and every sample counts once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.elastic import Report
from paceline.engines.ray.reforming import report_of
from paceline.errors import RunFailed, UsageError
from paceline.training.sharding import ShardedLoader
from tests.distributed.harness import SCRIPTS, events, pids, wait_until
from tests.distributed.local import Listener

pytestmark = pytest.mark.ray
SCRIPT = SCRIPTS / "survivors.py"
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def trained(directory: Path, *arguments: object, script: Path = SCRIPT, workers: int = 3, **options: object) -> Path:
    log, out = directory / "log", directory / "out"
    log.mkdir()
    given = [*map(str, arguments), "--log", str(log)]
    paceline.run(script, workers=workers, arguments=given, out=out, **{"watcher": Listener(), **options})
    return out


def undisturbed(*, workers: int = 3, epochs: int = 2, samples: int = 96, batch: int = 4, optimizer: str = "momentum"):
    """What one process makes of all workers' batches joined."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    update = OPTIMIZERS[optimizer](model.parameters())
    data = DataLoader(TensorDataset(inputs, labels), batch_size=batch, shuffle=True)
    parts = [ShardedLoader(data, rank=rank, size=workers, seed=0) for rank in range(workers)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(update, 0.98)
    for epoch in range(epochs):
        for each in zip(*(part.batches(epoch) for part in parts), strict=True):
            index = [sample for part in each for sample in part.samples]
            update.zero_grad()
            F.cross_entropy(model(inputs[index]), labels[index]).backward()
            update.step()
            scheduler.step()
    return model


def require_each_sample_once(out: Path, *, epochs: int = 2, samples: int = 96) -> None:
    """A joiner's first batch is another's, and counts nothing."""
    joined = {rank for event in of(out, "reformed") for rank in event["details"]["joined"]}
    counted: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for path in (out.parent / "log").glob("rank-*"):
        for line in path.read_text().splitlines()[int(path.name[5:]) in joined :]:
            epoch, _, *index = map(int, line.split())
            counted[epoch].update(index)
    assert all(each == Counter(range(samples)) for each in counted.values())


def require_same_model(out: Path, model: nn.Module, *, within: float = 1e-6) -> None:
    saved = load_file(out / "model.safetensors")
    torch.testing.assert_close(saved, model.state_dict(), rtol=1e-4, atol=within)


def of(out: Path, name: str) -> list[dict]:
    return [event for event in events(out) if event["name"] == name]


def test_a_worker_preempted_in_mid_step(tmp_path: Path, ray_here: None) -> None:
    """As TensorFlow's and torchft's tests of a worker that is preempted in the middle of a step."""
    listener = Listener()
    out = trained(tmp_path, "--fail", "1:5:kill", elastic="1:3", watcher=listener)
    (lost,), (reformed,) = of(out, "lost"), of(out, "reformed")
    assert listener.progress.num_workers == 2
    assert (lost["who"], lost["details"]["why"], lost["details"]["left"]) == ("worker-1", "its process ended", 2)
    assert (reformed["details"]["ranks"], reformed["details"]["step"]) == ([0, 2], 4)
    require_each_sample_once(out)
    require_same_model(out, undisturbed())
    steps = {int(row.split(",")[2]) for row in (out / "steps.csv").read_text().splitlines()[1:]}
    assert steps == set(range(1, 17))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "options"),
    [
        (["0:6:kill", "2:6:kill"], {"optimizer": "sgd"}),
        (["0:3:kill", "1:9:segfault"], {"optimizer": "adamw", "loaders": 2}),
        (["2:16:kill"], {}),
        (["1:5:stop"], {}),
        (["1:5:kill"], {"batch": 1, "samples": 24}),
    ],
    ids=["two at once", "the first, then one with loaders", "the last step", "stopped", "fewer samples than workers"],
)
def test_whoever_dies_the_model_is_the_undisturbed_one(tmp_path, ray_here, faults, options) -> None:
    """Two at once, one after another has recovered, one that is only stopped: as torchft and TensorFlow test it."""
    given = [word for fault in faults for word in ("--fail", fault)]
    given += [word for name, value in options.items() for word in (f"--{name}", value)]
    out = trained(tmp_path, *given, elastic="1:3")
    gone = sorted(int(fault[0]) for fault in faults)
    assert sorted(event["who"] for event in of(out, "lost")) == [f"worker-{rank}" for rank in gone]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [rank for rank in range(3) if rank not in gone]
    if faults == ["1:5:stop"]:
        assert "it was silent for" in of(out, "lost")[0]["details"]["why"]
    options.pop("loaders", None)
    if options.get("batch") != 1:  # there, samples come twice, and count once
        require_each_sample_once(out)
    require_same_model(out, undisturbed(**options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "call", "within"),
    [
        ("top-k:codec.ratio=1", "9:{}:Messages.start_all_to_all", 1e-6),
        ("powersgd:codec.rank=64:codec.least=0:codec.start=0", "17:{}:Messages.average", 0.05),
    ],
)
def test_workers_die_whose_gradients_are_coded(
    tmp_path: Path, ray_here: None, codec: str, call: str, within: float
) -> None:
    """One in its backward pass, one before it encodes, and one with an encoded gradient that nobody has. The means lack
    nothing, so that the model is to be the undisturbed one, but for what the dead owed: of powersgd's, their own
    matrices where the mean's columns do not span them."""
    exchange = "paceline.strategies.exchange"
    given = ["--fail", "1:3:kill", "--fail-at", f"3:5:{exchange}:Exchange.start"]
    given += ["--fail-at", f"0:{call.format(exchange)}"]
    strategy = f"all-reduce:codec={codec}:codec_scope=all"
    out = trained(tmp_path, *given, workers=4, strategy=strategy, elastic="1:4")
    assert sorted(event["who"] for event in of(out, "lost")) == ["worker-0", "worker-1", "worker-3"]
    require_each_sample_once(out)
    require_same_model(out, undisturbed(workers=4), within=within)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_workers_die_between_the_messages_of_an_average(tmp_path: Path, ray_here: None, algorithm: str) -> None:
    """One has handed on a part to some, and not to others: either all take the average, or nobody does."""
    sends = "paceline.comm.shared_memory.collective:SharedMemoryCollective.send_bytes"
    given = ["--fail", "1:3:kill", "--fail-at", f"3:26:{sends}", "--fail-at", f"0:41:{sends}"]
    out = trained(tmp_path, *given, workers=4, strategy=f"all-reduce:algorithm={algorithm}", elastic="1:4")
    assert sorted(event["who"] for event in of(out, "lost")) == ["worker-0", "worker-1", "worker-3"]
    require_each_sample_once(out)
    require_same_model(out, undisturbed(workers=4))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "number"), [("all-reduce", 16), ("local-sgd:every=2", 8)])
def test_a_worker_dies_between_the_messages_of_a_coded_exchange(
    tmp_path: Path, ray_here: None, strategy: str, number: int
) -> None:
    """It has sent the last ones of an exchange to one, and not to the other, which has no mean then."""
    sends = f"2:{number}:paceline.comm.shared_memory.collective:SharedMemoryCollective.send_bytes"
    options = ":codec=top-k:codec.ratio=0.5:codec_scope=all"
    out = trained(tmp_path, "--fail-at", sends, strategy=f"{strategy}{options}", elastic="1:3")
    assert [event["who"] for event in of(out, "lost")] == ["worker-2"]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [0, 1]


@pytest.mark.slow
def test_the_one_who_evaluates_dies_in_it(tmp_path: Path, ray_here: None) -> None:
    out = trained(tmp_path, "--fail-in-evaluation", 0, elastic="1:3", eval_every=4)
    assert [event["who"] for event in of(out, "lost")] == ["worker-0"]
    evaluations = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    # Word of the first one is under way for up to a tenth of a second, in which the worker may die that made it.
    assert [evaluation["iteration"] for evaluation in evaluations[-4:]] == [4, 8, 12, 16]
    assert [evaluation["samples"] for evaluation in evaluations[-4:]] == [48, 96, 144, 192]
    require_each_sample_once(out)
    require_same_model(out, undisturbed())


@pytest.mark.slow
def test_a_growing_batch_counts_each_sample_once(tmp_path: Path, ray_here: None) -> None:
    out = trained(tmp_path, "--fail", "1:3:kill", "--samples", 101, "--epochs", 3, elastic="1:3", global_batch="grow")
    require_each_sample_once(out, epochs=3, samples=101)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 303
    with pytest.raises(UsageError, match="saved by an elastic run; resume it with --elastic MIN:MAX"):
        paceline.run(SCRIPT, workers=2, arguments=["--log", str(tmp_path / "log")], resume=out)


@pytest.mark.slow
def test_too_few_are_left(tmp_path: Path, ray_here: None) -> None:
    with pytest.raises(RunFailed, match="1 workers are left, and --elastic asks for 2 or more"):
        trained(tmp_path, "--fail", "0:4:kill", "--fail", "1:4:kill", elastic="2:3")


TOLD = """
import os, signal, sys
from pathlib import Path

import paceline, torch
from torch.utils.data import DataLoader, TensorDataset

worker = paceline.init()
model = torch.nn.Linear(4, 1)
data = DataLoader(TensorDataset(torch.ones(96, 4)), batch_size=4)
model, optimizer, data = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
try:
    for step, (inputs,) in enumerate(data):
        if (worker.rank, step) == (1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
except BaseException as error:
    Path(sys.argv[1], f"told-{worker.rank}").write_text(str(error))
    raise
"""


@pytest.mark.slow
def test_workers_are_told_when_what_they_report_ends_the_run(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end by themselves, with their scripts' own clean-up, whatever the launcher was at when it found that out."""

    def further(body: Mapping[str, Any]) -> Report:
        report = report_of(body)
        return replace(report, applied=report.applied + 2) if report.rank == 2 else report

    monkeypatch.setattr("paceline.engines.ray.survival.report_of", further)
    script = tmp_path / "train.py"
    script.write_text(TOLD)
    out, words = tmp_path / "out", "steps far"
    with pytest.raises(RunFailed, match=words):
        paceline.run(script, workers=3, elastic="1:3", arguments=[str(tmp_path)], out=out, watcher=Listener())
    assert [words in (tmp_path / f"told-{rank}").read_text() for rank in (0, 2)] == [True, True]
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids(out).values()))


@pytest.mark.slow
def test_the_command_names_who_was_lost_and_leaves_nothing(start, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    log.mkdir()
    command = start(
        "run", SCRIPT, "--workers", 3, "--elastic", "2:3", "--out", out, "--",
        "--fail", "2:5:kill", "--loaders", 2, "--log", log,
    )  # fmt: skip
    output = command.wait()
    assert command.status == 0, output
    assert f"worker 2 (process {pids(out)['worker-2']}) is lost: its process ended; workers left: 2" in output
    assert "worker 0, worker 1: on from step 5" in output
    require_each_sample_once(out)
    command.assert_nothing_left()
