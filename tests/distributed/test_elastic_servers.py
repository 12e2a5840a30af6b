"""Workers die, leave and join under parameter servers: the others train on, what was pushed counts whole or not at all,
and what the gone have left of their data, and those who were there before a joiner, is trained on by whoever asks."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.checkpoint_files import from_newest, iteration_of
from paceline.engines.ray.elastic_members import ElasticMembers
from tests.covering import in_turns, stood_for
from tests.distributed.harness import is_training, wait_until
from tests.distributed.local import Listener
from tests.distributed.test_elastic import (
    SCRIPT,
    of,
    require_each_sample_once,
    require_same_model,
    trained,
    undisturbed,
)
from tests.distributed.test_joining import held, iterations_of, joined, scale

pytestmark = pytest.mark.ray
# Before a worker waits for the answers of servers, which it has asked; and before it asks one.
AFTER_ASKING = "paceline.comm.servers.sockets:SocketCarrier._receive_some"
BEFORE_ASKING = "paceline.comm.servers.line:WorkerLine.send"
# In an update of servers' shards that it makes itself: before an even call one of two servers has it.
UPDATING = "paceline.comm.servers.loan:Loan.put_in_force"


def updates(out: Path) -> list[tuple[int, int, int]]:
    """Server, worker and clock of each gradient that counted."""
    rows = [row.split(",") for row in (out / "updates.csv").read_text().splitlines()[1:]]
    return [(int(row[0]), int(row[2]), int(row[3])) for row in rows]


def require_whole(out: Path, *, servers: int, gradients: int = 48) -> None:
    """Each gradient counted on every server, once, and there are as many as there are batches."""
    counted = Counter(updates(out))
    assert set(counted.values()) == {1}
    by_server = [{each[1:] for each in counted if each[0] == server} for server in range(servers)]
    assert all(each == by_server[0] for each in by_server)
    assert len(by_server[0]) == gradients


def require_each_sample(out: Path, *, times: int, samples: int = 96) -> None:
    """A joiner's first batch counts, too; a fast worker may do in a later epoch what was left of an earlier one."""
    lines = [line.split() for path in (out.parent / "log").glob("rank-*") for line in path.read_text().splitlines()]
    assert Counter(int(index) for _, _, *indices in lines for index in indices) == dict.fromkeys(range(samples), times)


def told_of(out: Path) -> dict[str, list[dict]]:
    return {name: of(out, name) for name in ("lost", "let_go", "left_over", "refused")}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ps-asp", stood_for("ps-ssp"), "ps-bsp"])
def test_a_worker_dies_in_backward(tmp_path: Path, ray_here: None, strategy: str) -> None:
    given = ["--fail", "1:5:kill", "--step-s", 0.01]
    # All meet to evaluate, so that none is through before the one dies.
    out = trained(tmp_path, *given, strategy=strategy, elastic="1:3", eval_every=16)
    told = told_of(out)
    assert [event["who"] for event in told["lost"]] == ["worker-1"]
    assert told["let_go"][0]["details"] == {
        "epoch": 0, "own": 4, "length": 8, "left_over": 0, "samples": 16, "steps": 4,
    }  # fmt: skip
    assert not told["left_over"]
    assert not told["refused"]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [0, 2]
    require_each_sample(out, times=2)
    if strategy == "ps-bsp":  # the others wait until what is left is known
        require_each_sample_once(out)
    require_whole(out, servers=1)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 192


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "faults", "gone"),
    [
        ("ps-bsp", ["--fail", "0:4:kill", "--fail", "2:9:kill"], [0, 2]),
        ("ps-ssp", ["--fail-at", f"1:9:{AFTER_ASKING}"], [1]),
        ("ps-bsp", ["--fail-at", f"1:16:{BEFORE_ASKING}"], [1]),
        ("ps-asp", ["--fail-at", f"1:17:{BEFORE_ASKING}"], [1]),
        ("ps-ssp", ["--fail", "1:5:stop"], [1]),
        ("ps-asp", ["--fail", "1:5:segfault", "--loaders", 2], [1]),
    ],
    ids=["the first, then another", "having pushed", "asking one", "asking the other", "stopped", "with loaders"],
)
def test_whoever_dies_each_gradient_counts_whole(tmp_path: Path, ray_here: None, strategy, faults, gone) -> None:
    given = [*faults, "--step-s", 0.02]
    out = trained(tmp_path, *given, strategy=strategy, options={"servers": 2}, elastic="1:3", eval_every=20)
    told = told_of(out)
    assert sorted(event["who"] for event in told["lost"]) == [f"worker-{rank}" for rank in gone]
    assert not told["left_over"]
    require_whole(out, servers=2)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 192


@pytest.mark.parametrize(("strategy", "number"), in_turns([4, 5], ["ps-asp", "ps-bsp"]))
def test_one_dies_in_an_update_that_it_makes_itself(tmp_path: Path, ray_here: None, strategy: str, number: int) -> None:
    # When one server has it, and when none has.
    given = ["--tally", "--fail-at", f"1:{number}:{UPDATING}", "--step-s", 0.02, "--epochs", 4]
    out = trained(tmp_path, *given, strategy=strategy, options={"servers": 2}, elastic="1:3", eval_every=100)
    told = told_of(out)
    assert [event["who"] for event in told["lost"]] == ["worker-1"]
    assert not told["left_over"]
    require_whole(out, servers=2, gradients=96)
    if strategy == "ps-asp":  # there each gradient is an update, so that the model tells
        for half in load_file(out / "model.safetensors").values():
            assert torch.equal(half, torch.full((96,), 4.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "faults", "gone"),
    [
        ("ps-asp", ["--fail-in-evaluation", 0], 0),
        ("ps-asp", ["--fail-at", "1:3:paceline.training.pauses:Pauses.meet"], 1),
        ("ps-bsp", ["--fail-at", "1:3:paceline.training.pauses:Pauses.part"], 1),
    ],
    ids=["evaluating", "coming to a pause", "at the end of one"],
)
def test_the_others_end_a_pause_in_which_one_dies(tmp_path: Path, ray_here: None, strategy, faults, gone) -> None:
    out = trained(
        tmp_path, *faults, "--step-s", 0.01, strategy=strategy, elastic="1:3", eval_every=8, checkpoint_every=8
    )
    assert [event["who"] for event in of(out, "lost")] == [f"worker-{gone}"]
    assert not of(out, "left_over")
    require_whole(out, servers=1)
    require_each_sample_once(out)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 192


@pytest.mark.slow
def test_a_servers_death_ends_the_run(tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not taken for that of the worker of its number."""
    survive, struck = ElasticMembers.survive, set[int]()

    def strike(self: ElasticMembers) -> None:
        if self._survival.has_begun and not struck:
            struck.add(self._members.infos["server-1"].pid)
            os.kill(*struck, signal.SIGKILL)
        survive(self)

    monkeypatch.setattr(ElasticMembers, "survive", strike)
    given = ["--epochs", 1000, "--step-s", 0.05]
    with pytest.raises(paceline.RunFailed, match=r"server 1 \(process \d+\) died"):
        trained(tmp_path, *given, workers=2, strategy="ps-asp", options={"servers": 2}, elastic="1:2")
    assert not of(tmp_path / "out", "lost")


@pytest.mark.slow
def test_while_nobody_dies_a_run_is_the_static_one(tmp_path: Path, ray_here: None) -> None:
    out = trained(tmp_path, strategy="ps-bsp", elastic="1:3")
    require_same_model(out, undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [("ps-asp", 4), ("ps-bsp", 2)])
def test_a_run_in_which_one_died_goes_on_with_any_number(tmp_path: Path, ray_here: None, strategy, workers) -> None:
    given = ["--fail", "1:5:kill", "--epochs", 3, "--step-s", 0.02]
    out = trained(tmp_path, *given, strategy=strategy, elastic="1:4", checkpoint_every=10, keep_checkpoints=9)
    saved = sorted(filter(None, map(iteration_of, from_newest(out))))[1]
    counted = sum(int(row.split(",")[1]) <= saved for row in (out / "updates.csv").read_text().splitlines()[1:])
    again, log = tmp_path / "again", tmp_path / "log-again"
    log.mkdir()
    paceline.run(
        SCRIPT,
        strategy=strategy,
        workers=workers,
        elastic="1:4",
        resume=out,
        resume_from=saved,
        out=again,
        arguments=["--epochs", "3", "--log", str(log)],
        watcher=Listener(),
    )
    assert json.loads((again / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 288
    assert len(updates(again)) == 72 - counted
    assert sum(len(path.read_text().splitlines()) for path in log.glob("rank-*")) == 72 - counted
    assert len(of(again, "left_over")) == 0


@contextmanager
def meanwhile(directory: Path, *turns: tuple[int, int | None, dict[str, int]]) -> Iterator[None]:
    """At each of these iterations, after which all wait, asks for so many workers, if that is given, and has all go on
    when there are so many of each of these events."""
    out, failures = directory / "out", list[BaseException]()

    def go_on(iteration: int) -> None:
        (directory / "log" / f"go-{iteration}").touch()

    def ask() -> None:
        try:
            assert wait_until(lambda: out.exists() and is_training(out))
            for iteration, number, wanted in turns:
                assert wait_until(lambda i=iteration: max(iterations_of(out), default=0) >= i)
                if number is not None:
                    scale(out, number)
                for name, count in wanted.items():
                    assert wait_until(lambda n=name, c=count: len(of(out, n)) >= c), name
                go_on(iteration)
        except BaseException as failure:
            failures.append(failure)
            for iteration, *_ in turns:
                go_on(iteration)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    thread.join()
    assert not failures, failures


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "servers", "workers"), [("ps-bsp", 2, 2), ("ps-asp", 1, 1)])
def test_one_joins_and_leaves(tmp_path: Path, ray_here: None, strategy: str, servers: int, workers: int) -> None:
    """It does what the others had not begun, and has a lane of the next epochs, until it goes."""
    turns = [(5, workers + 1, {"ready": 1}), (12, None, {"let_in": 1}), (20, workers, {})]
    with meanwhile(tmp_path, *turns):
        out = trained(
            tmp_path, "--epochs", 3, *held(5, 12, 20), workers=workers, strategy=strategy,
            options={"servers": servers}, elastic="1:3", eval_every=16, checkpoint_every=16,
        )  # fmt: skip
    assert joined(out) == [workers]
    assert [event["who"] for event in of(out, "left")] == [f"worker-{workers}"]
    assert not any(told_of(out)[name] for name in ("lost", "left_over", "refused"))
    assert of(out, "let_go")[0]["details"]["steps"] > 0
    require_each_sample(out, times=3)
    require_whole(out, servers=servers, gradients=72)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 288


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "options"),
    [
        (["--fail", "0:6:kill", "--fail", "2:6:kill"], {"optimizer": "sgd"}),
        (["--fail", "0:3:kill", "--fail", "1:9:segfault"], {"optimizer": "adamw", "loaders": 2}),
        (["--fail-at", f"1:16:{BEFORE_ASKING}"], {}),
        (["--fail-at", f"2:17:{BEFORE_ASKING}", "--fail", "1:16:kill"], {}),
    ],
    ids=["two at once", "the first, then one with loaders", "asking one", "asking the other, and in the last step"],
)
def test_updates_are_of_whole_batches_whoever_dies(tmp_path: Path, ray_here: None, faults, options) -> None:
    given = [*faults, *(word for name, value in options.items() for word in (f"--{name}", value))]
    out = trained(
        tmp_path, *given, strategy="ps-bsp", options={"servers": 2}, elastic="1:3", global_batch="keep", eval_every=4
    )
    assert len(of(out, "lost")) == len(faults) // 2
    options.pop("loaders", None)
    require_same_model(out, undisturbed(**options))
    evaluations = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    assert [(each["iteration"], each["samples"]) for each in evaluations[-4:]] == [(n, 12 * n) for n in (4, 8, 12, 16)]
    assert set(Counter(updates(out)).values()) == {1}


@pytest.mark.slow
def test_updates_are_of_whole_batches_whoever_joins_and_leaves(tmp_path: Path, ray_here: None) -> None:
    turns = [(5, 3, {"ready": 1}), (12, None, {"let_in": 1}), (20, 2, {})]
    with meanwhile(tmp_path, *turns):
        out = trained(
            tmp_path, "--epochs", 3, *held(5, 12, 20), workers=2, strategy="ps-bsp", elastic="1:3",
            global_batch="keep", eval_every=16, checkpoint_every=16,
        )  # fmt: skip
    assert joined(out) == [2]
    assert [event["who"] for event in of(out, "left")] == ["worker-2"]
    require_same_model(out, undisturbed(workers=2, epochs=3))
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 288
    assert any(worker == 2 for _, worker, _ in updates(out))


@pytest.mark.slow
def test_what_codecs_leave_out_is_owed(tmp_path: Path, ray_here: None) -> None:
    """Three of a half's elements go with each push, of four and what is owed. Of one that is killed what it owes is
    lost; one that leaves owes nothing. Nobody comes to the hold before the one is dead, which they would wait for."""
    strategy = "ps-ssp:staleness=1:codec=top-k:codec.ratio=0.03:codec_scope=all"
    with meanwhile(tmp_path, (24, 1, {})):
        out = trained(
            tmp_path, "--tally", "--owed", "--fail", "1:5:kill", *held(24), strategy=strategy,
            options={"servers": 2}, elastic="1:3",
        )  # fmt: skip
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert [event["who"] for event in of(out, "left")] == ["worker-2"]
    require_each_sample(out, times=2)
    require_whole(out, servers=2)
    said = {rank: (tmp_path / "log" / f"owed-{rank}").read_text().split() for rank in range(3)}
    owed = {rank: torch.tensor([float(each) for each in own]).view(2, 96) for rank, own in said.items()}
    assert owed[0].any()
    assert owed[1].any()
    assert not owed[2].any()
    model = load_file(out / "model.safetensors")
    halves = torch.stack([model["halves.0"], model["halves.1"]])
    assert torch.equal(halves - torch.stack([*owed.values()]).sum(0), torch.full((2, 96), 2.0))


@pytest.mark.slow
def test_who_dies_is_replaced(tmp_path: Path, ray_here: None) -> None:
    """Also where its successor dies before it has joined. The one after that meets the other at the end alone. Loaders
    have fetched ahead what they do not give back. The dead one comes to its step before the hold, since the other is
    three steps ahead of it at most."""
    turns = [(8, None, {"ready": 1}), (14, None, {"not_joined": 1, "ready": 2}), (20, None, {"let_in": 1})]
    with meanwhile(tmp_path, *turns):
        out = trained(
            tmp_path, "--epochs", 3, "--fail", "1:2:kill", "--fail-to-join", "2:taking", "--loaders", 1,
            *held(8, 14, 20), workers=2, strategy="ps-ssp", elastic="1:2", replace=2,
        )  # fmt: skip
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert [event["who"] for event in of(out, "not_joined")] == ["worker-2"]
    assert joined(out) == [3]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [0, 3]
    require_each_sample(out, times=3)
    require_whole(out, servers=1, gradients=72)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 288


@pytest.mark.slow
def test_deaths_around_a_join(tmp_path: Path, ray_here: None) -> None:
    """Who gives its state dies in that, so that another one gives; of those who take it one dies in that, one has
    another model, and one dies in its first step."""
    to_join = ["--fail-to-join", "2:taking", "--fail-to-join", "4:another model"]
    faults = ["--fail-giving", 0, "--fail", "3:1:kill", *to_join]
    turns = [(5, 5, {"ready": 3}), (12, None, {"let_in": 1, "not_joined": 2})]
    with meanwhile(tmp_path, *turns):
        out = trained(
            tmp_path, "--epochs", 3, *faults, *held(5, 12), workers=2, strategy="ps-bsp", options={"servers": 2},
            elastic="1:5",
        )  # fmt: skip
    assert {event["who"] for event in of(out, "lost")} == {"worker-0", "worker-3"}
    why = {event["who"]: event["details"]["why"] for event in of(out, "not_joined")}
    assert why.keys() == {"worker-2", "worker-4"}
    assert "would join with another model: only one of the two has 5." in why["worker-4"]
    assert not of(out, "left_over")
    require_each_sample(out, times=3)
    require_whole(out, servers=2, gradients=72)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 288


@pytest.mark.slow
def test_a_worker_leaves_when_it_is_asked_to(start, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    log.mkdir()
    command = start(
        "run", SCRIPT, "--strategy", "ps-ssp", "--workers", 3, "--elastic", "1:4", "--out", out, "--",
        "--log", log, "--step-s", 0.05, "--samples", 960, "--epochs", 1, *held(100),
    )  # fmt: skip
    assert wait_until(lambda: (log / "rank-2").exists())
    fewer = start("scale", out, "--workers", 2)
    assert "1 leave after their present step" in fewer.wait()
    (log / "go-100").touch()
    output = command.wait()
    assert command.status == 0, output
    assert of(out, "left")[0]["who"] == "worker-2"
    assert not of(out, "left_over")
    require_each_sample_once(out, epochs=1, samples=960)
    require_whole(out, servers=1, gradients=240)
    command.assert_nothing_left()


MEETS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

worker = paceline.init()
model = torch.nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2)
model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for (batch,) in loader:
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
    with worker.meeting("between steps"):
        pass
"""


@pytest.mark.slow
def test_scripts_that_meet_are_refused_where_each_step_needs_all(tmp_path: Path, ray_here: None) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    with pytest.raises(paceline.UsageError, match=r"between steps: with --elastic under ps-bsp.*use ps-asp"):
        paceline.run(tmp_path / "meets.py", strategy="ps-bsp", workers=2, elastic="1:2", out=tmp_path / "run")
