"""Servers are killed in the middle of a run: with replicas it goes on as if they had not been."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Checkpoint
from paceline.records import UpdateRecord, read_records
from tests.covering import in_turns, stood_for
from tests.distributed.harness import TRAIN, Command, events, is_training, num_steps, pids, starting, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NUM_STEPS = 120
SOON_S = 240.0  # of a busy machine; the deadline is 300 s
Start = Callable[..., Command]


def begin(
    start: Start,
    out: Path,
    strategy: str,
    *faults: object,
    steps: int = NUM_STEPS,
    step_s: float = 0.01,
    elastic: Sequence[str] = (),
    **options: int | str,
) -> Command:
    chosen = [f"--option={name}={value}" for name, value in options.items()]
    return start(
        "run", TRAIN, "--strategy", strategy, "--workers", 2, "--eval-every", 40, "--out", out, *elastic, *chosen, "--",
        *faults, "--step-s", step_s, "--steps", steps, "--results", out,
    )  # fmt: skip


def checkpoint(out: Path) -> Checkpoint:
    return Checkpoint.decode((out / "checkpoint.pt").read_bytes(), where="checkpoint.pt")


def assert_equal(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert own.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())


def kill(out: Path, server: int) -> float:
    pid = pids(out)[f"server-{server}"]
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


HELD_AT = (100, 200)
HOLDS = [word for step in HELD_AT for word in ("--hold", step)]


def go_on(out: Path, step: int) -> None:
    """No worker makes this step before."""
    (out / f"go-{step}").touch()


def has(out: Path, name: str) -> bool:
    return bool(of(out, name))


def of(out: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in events(out) if event["name"] == name]


def test_the_model_is_that_of_the_undisturbed_run(start: Start, start_on_cluster: Start, tmp_path: Path) -> None:
    outs = [tmp_path / "whole", *(tmp_path / f"without-{server}" for server in (0, 1))]
    output = begin(start_on_cluster, outs[0], "ps-bsp", servers=2, replicas=1).wait()
    assert checkpoint(outs[0]).iteration == NUM_STEPS, output
    for server, out in enumerate(outs[1:]):
        faults = ["--fault", "kill-server", "--rank", server, "--step", 40]
        command = begin(start, out, "ps-bsp", *faults, servers=2, replicas=1)
        output = command.wait()
        assert command.status == 0, output
        command.assert_nothing_left()
    whole = checkpoint(outs[0])
    for server, out in enumerate(outs[1:]):
        saved = checkpoint(out)
        assert saved.iteration == NUM_STEPS
        assert_equal(saved.model, whole.model)
        assert_equal(saved.optimizer, whole.optimizer)
        (lost,), (taken,) = of(out, "server_lost"), of(out, "taken_over")
        assert lost["who"] == f"server-{server}"
        process, why = pids(out)[lost["who"]], "its process ended"
        assert lost["details"] == {"process": process, "why": why, "key_ranges": [server], "left": 1}
        assert taken["who"] == f"server-{1 - server}"
        assert taken["details"]["key_range"] == server
        assert taken["details"]["took_s"] < 30.0, "a tenth of the deadline"


@pytest.mark.parametrize(("strategy", "victim"), in_turns([0, 1], ["ps-asp", "ps-ssp"]))
def test_every_gradient_counts_once(start_on_cluster: Start, tmp_path: Path, strategy: str, victim: int) -> None:
    out = tmp_path / "out"
    command = begin(
        start_on_cluster, out, strategy, "--fault", "kill-server", "--rank", victim, "--step", 40, servers=2, replicas=1
    )
    output = command.wait()
    assert command.status == 0, output
    assert checkpoint(out).iteration == 2 * NUM_STEPS
    updates = read_records(out, UpdateRecord)
    seen = Counter((record.server, record.worker, record.clock) for record in updates)
    assert max(seen.values()) == 1
    whole = [record for record in updates if record.server != victim]
    assert sorted((record.worker, record.clock) for record in whole) == [
        (w, c) for w in (0, 1) for c in range(NUM_STEPS)
    ]
    # Of those that the dead one made, records of its last half second may be missing, but no number is given twice.
    numbers = sorted(record.iteration for record in updates if record.server == victim)
    assert all(after == before + 1 for before, after in pairwise(numbers[-NUM_STEPS // 2 :]))
    assert numbers[-1] == 2 * NUM_STEPS


@pytest.fixture(scope="module")
def undisturbed(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The end of a run of 400 steps with three servers, none of which dies."""
    folder = tmp_path_factory.mktemp("undisturbed")
    out = folder / "out"
    with starting(folder) as start:
        on_cluster = partial(start, RAY_ADDRESS=cluster)
        output = begin(on_cluster, out, "ps-bsp", steps=400, step_s=0, servers=3, replicas=1).wait()
    saved = checkpoint(out)
    assert saved.iteration == 400, output
    return saved


def test_two_replicas_outlive_two_deaths(start_on_cluster: Start, undisturbed: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = begin(start_on_cluster, out, "ps-bsp", *HOLDS, steps=400, step_s=0.02, servers=3, replicas=2)
    assert wait_until(lambda: num_steps(out) > 20)
    kill(out, 0)
    assert wait_until(lambda: has(out, "taken_over"), within_s=SOON_S)
    go_on(out, 100)
    assert wait_until(lambda: num_steps(out) > 2 * 100, within_s=SOON_S)
    kill(out, 2)  # which has taken over
    go_on(out, 200)
    output = command.wait()
    assert command.status == 0, output
    assert [event["who"] for event in of(out, "server_lost")] == ["server-0", "server-2"]
    taken = [(event["who"], event["details"]["key_range"]) for event in of(out, "taken_over")]
    assert taken[0] == ("server-2", 0)
    assert sorted(taken[1:]) == [("server-1", 0), ("server-1", 2)]
    assert_equal(checkpoint(out).model, undisturbed.model)


# What --elastic adds is in test_elastic_replicas.py, and in the schedules of test_chaos.py.
EITHER = [(), stood_for(("--elastic", "1:2"))]


@pytest.mark.parametrize("elastic", EITHER)
def test_copies_are_made_anew(
    start_on_cluster: Start, undisturbed: Checkpoint, tmp_path: Path, elastic: tuple[str, ...]
) -> None:
    """Each key range has two copies, and lives through the deaths of both that had it at first."""
    out = tmp_path / "out"
    settings = {"steps": 400, "step_s": 0.02, "servers": 3, "replicas": 1}
    command = begin(start_on_cluster, out, "ps-bsp", *HOLDS, elastic=elastic, **settings)
    assert wait_until(lambda: num_steps(out) > 20)
    kill(out, 1)
    assert wait_until(lambda: len(of(out, "copied")) == 2, within_s=SOON_S)
    go_on(out, 100)
    assert wait_until(lambda: num_steps(out) > 2 * 100, within_s=SOON_S)
    kill(out, 0)
    go_on(out, 200)
    output = command.wait()
    assert command.status == 0, output
    assert [event["who"] for event in of(out, "server_lost")] == ["server-1", "server-0"]
    assert not of(out, "not_copied")
    assert all(event["details"]["copies"] == 2 for event in of(out, "copied"))
    assert {event["details"]["key_range"] for event in of(out, "taken_over") if event["who"] == "server-2"} == {0, 1}
    assert_equal(checkpoint(out).model, undisturbed.model)
    assert_equal(checkpoint(out).optimizer, undisturbed.optimizer)


@pytest.mark.parametrize("elastic", EITHER)
def test_what_codecs_leave_out_is_owed_as_if_no_server_had_died(
    start: Start, tmp_path: Path, elastic: tuple[str, ...]
) -> None:
    coded = {"servers": 2, "replicas": 1, "codec": "top-k:ratio=0.1", "codec_scope": "all"}
    outs = [tmp_path / "whole", tmp_path / "without-1"]
    for out, faults in zip(outs, [(), ("--fault", "kill-server", "--rank", 1, "--step", 40)], strict=True):
        command = begin(start, out, "ps-bsp", *faults, elastic=elastic, **coded)
        output = command.wait()
        assert command.status == 0, output
        command.assert_nothing_left()
    whole, saved = map(checkpoint, outs)
    assert [event["who"] for event in of(outs[1], "server_lost")] == ["server-1"]
    assert_equal(saved.model, whole.model)
    assert_equal(saved.optimizer, whole.optimizer)


def test_the_death_of_every_copy_ends_the_run(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = begin(start, out, "ps-asp", steps=100_000, servers=2, replicas=1)
    assert wait_until(lambda: has(out, "checkpoint") or is_training(out))
    time.sleep(1.0)
    kill(out, 1)
    assert wait_until(lambda: has(out, "taken_over"), within_s=SOON_S)
    killed_s = kill(out, 0)
    output = command.wait()
    assert time.monotonic() - killed_s < SOON_S
    assert command.status == 1
    members = pids(out)
    named = rf"server 1 \(process {members['server-1']}\) and server 0 \(process {members['server-0']}\) have died"
    assert re.search(named + r", and with them every copy of key range 0, 1", output)
    assert "has no checkpoint yet" in output or f"--resume {out} goes on from its checkpoint of iteration" in output
    assert "Traceback" not in output
    command.assert_nothing_left()
