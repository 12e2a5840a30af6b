"""Rows of tables in elastic runs under servers: workers die, leave and join, and servers with copies die as well. Each
gradient of a row counts once, with the push that it belongs to, or neither does."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import paceline
from benchmarks.namespaces import Network
from paceline.checkpoint_files import from_newest, iteration_of
from tests.covering import in_turns
from tests.distributed.harness import pids, wait_until
from tests.distributed.local import Listener
from tests.distributed.own_network import own_network
from tests.distributed.test_elastic import SCRIPT, of, trained
from tests.distributed.test_elastic_hosts import BETWEEN_SERVERS, PATIENCE_S, end, host_of, pids_on, said, wait_for
from tests.distributed.test_elastic_hosts import start as begin
from tests.distributed.test_elastic_replicas import (
    COPIES,
    HOLD_AFTER_A_DEATH,
    kill,
    require_taken_over,
    struck,
    struck_before,
)
from tests.distributed.test_elastic_servers import (
    AFTER_ASKING,
    BEFORE_ASKING,
    meanwhile,
    require_each_sample,
    require_whole,
    told_of,
)
from tests.distributed.test_joining import held, joined

pytestmark = [pytest.mark.ray, pytest.mark.slow]
COUNTED = ["--tally", "--rows"]
SAMPLES = 192
"""Of a run between hosts: as many batches of 4, whether two workers or three have a part of an epoch."""
# Before a worker takes what a server answers to a request about rows, of which one in two is for their gradients.
ANSWERED = "paceline.server.tables.client_core:TableClient.receive"
TWO = {"servers": 2}


def rows_of(out: Path, *, samples: int = 96) -> Tensor:
    """Each sample's row has one element."""
    saved = load_file(out / "rows.safetensors")
    assert saved["samples.keys"].tolist() == [number * 2**40 for number in range(samples)]
    return saved["samples.rows"][:, 0]


def replayed(out: Path, *, samples: int, server: int) -> Tensor:
    """What one process makes of the batches that workers have written down, in the updates that this server has."""
    logs = (out.parent / "log").glob("rank-*")
    batches = {int(log.name[5:]): [list(map(int, line.split()[2:])) for line in log.open()] for log in logs}
    rows = [row.split(",") for row in (out / "updates.csv").read_text().splitlines()[1:]]
    counted = sorted((int(row[3]), int(row[2]), int(row[1])) for row in rows if int(row[0]) == server)
    of_update, counts = Counter(update for _, _, update in counted), torch.zeros(samples)
    next_of = {rank: iter(own) for rank, own in batches.items()}
    for _, rank, update in counted:  # a worker's, in the order of its clock
        counts[next(next_of[rank])] += 1 / of_update[update]
    assert all(len(list(left)) <= 1 for left in next_of.values()), "the last of one that died may count nowhere"
    return counts


def require_rows_counted(out: Path, *, times: int | None, samples: int = 96, server: int = 0) -> None:
    """Rows have what the model's parameters have, which are of the same pushes, and what a replay has; where each
    gradient is an update, that is how often each sample was trained on.

    Args:
        server: one that lives to the end.
    """
    rows, halves = rows_of(out, samples=samples), load_file(out / "model.safetensors")
    if times is not None:
        assert torch.equal(rows, torch.full((samples,), float(times))), rows
    for half in (*halves.values(), replayed(out, samples=samples, server=server)):
        torch.testing.assert_close(rows, half, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("strategy", "turn"), in_turns(range(4), ["ps-ssp", "ps-bsp", "ps-asp"]))
def test_a_worker_dies_before_it_asks_a_server(tmp_path: Path, ray_here: None, strategy: str, turn: int) -> None:
    """A step sends four messages: to each of two servers the rows' gradients, and the push."""
    given = [*COUNTED, "--fail-at", f"1:{24 + turn}:{BEFORE_ASKING}", "--step-s", 0.02]
    out = trained(tmp_path, *given, strategy=strategy, options=TWO, elastic="1:3", eval_every=20)
    told = told_of(out)
    assert [event["who"] for event in told["lost"]] == ["worker-1"]
    assert not told["left_over"]
    require_whole(out, servers=2)
    require_rows_counted(out, times=None if strategy == "ps-bsp" else 2)


@pytest.mark.parametrize(
    ("strategy", "faults", "gone"),
    [
        ("ps-bsp", ["--fail", "0:4:kill", "--fail", "2:9:kill"], [0, 2]),
        ("ps-ssp", ["--fail-at", f"1:19:{AFTER_ASKING}"], [1]),
        ("ps-asp", ["--fail", "1:5:stop"], [1]),
    ],
    ids=["the first, then another", "having asked", "stopped"],
)
def test_whoever_dies_rows_count_with_their_push(tmp_path: Path, ray_here: None, strategy, faults, gone) -> None:
    given = [*COUNTED, *faults, "--step-s", 0.02]
    out = trained(tmp_path, *given, strategy=strategy, options=TWO, elastic="1:3", eval_every=20, checkpoint_every=12)
    told = told_of(out)
    assert sorted(event["who"] for event in told["lost"]) == [f"worker-{rank}" for rank in gone]
    assert not told["left_over"]
    require_whole(out, servers=2)
    require_rows_counted(out, times=None if strategy == "ps-bsp" else 2)


def test_while_nobody_dies_rows_are_those_of_the_static_run(tmp_path: Path, ray_here: None) -> None:
    found = {}
    for name, elastic in (("elastic", "1:3"), ("static", None)):
        (tmp_path / name).mkdir()
        out = trained(tmp_path / name, *COUNTED, strategy="ps-bsp", options=TWO, elastic=elastic)
        found[name] = rows_of(out)
    torch.testing.assert_close(found["elastic"], found["static"], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("strategy", "options", "workers"), [("ps-bsp", TWO, 2), ("ps-asp", COPIES, 2)])
def test_one_joins_and_leaves(
    tmp_path: Path, ray_here: None, strategy: str, options: dict[str, Any], workers: int
) -> None:
    """It has the rows that servers have, and the rate that the others' script has set."""
    turns = [(5, workers + 1, {"ready": 1}), (12, None, {"let_in": 1}), (20, workers, {})]
    with meanwhile(tmp_path, *turns):
        out = trained(
            tmp_path, *COUNTED, "--epochs", 3, *held(5, 12, 20), workers=workers, strategy=strategy, options=options,
            elastic="1:3", eval_every=16, checkpoint_every=16,
        )  # fmt: skip
    assert joined(out) == [workers]
    assert [event["who"] for event in of(out, "left")] == [f"worker-{workers}"]
    assert not any(told_of(out)[name] for name in ("lost", "left_over", "refused"))
    assert of(out, "let_go")[0]["details"]["steps"] > 0
    require_each_sample(out, times=3)
    require_whole(out, servers=2, gradients=72)
    require_rows_counted(out, times=None if strategy == "ps-bsp" else 3)


def test_rows_in_files_go_on_with_any_number_of_workers(tmp_path: Path, ray_here: None) -> None:
    """From a checkpoint that was made when one had died."""
    options = {**TWO, "table_dir": str(tmp_path / "tables")}
    (tmp_path / "tables").mkdir()
    given = [*COUNTED, "--fail", "1:3:kill", "--epochs", 3, "--step-s", 0.02]
    kept = {"checkpoint_every": 10, "keep_checkpoints": 9}
    out = trained(tmp_path, *given, strategy="ps-asp", options=options, elastic="1:4", **kept)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    saved = sorted(filter(None, map(iteration_of, from_newest(out))))[1]
    again, log = tmp_path / "again", tmp_path / "log-again"
    log.mkdir()
    paceline.run(
        SCRIPT, strategy="ps-asp", workers=4, elastic="1:4", options={"servers": 3}, resume=out, resume_from=saved,
        out=again, arguments=[*COUNTED, "--epochs", "3", "--log", str(log)], watcher=Listener(),
    )  # fmt: skip
    assert not of(again, "left_over")
    assert torch.equal(rows_of(again), torch.full((96,), 3.0))


@pytest.mark.parametrize("strategy", ["ps-asp", "ps-bsp"])
def test_a_worker_and_a_server_die_at_once(tmp_path: Path, ray_here: None, strategy: str) -> None:
    out, held_at = tmp_path / "out", HOLD_AFTER_A_DEATH[strategy]
    given = [*COUNTED, "--fail", "1:5:kill", "--step-s", 0.02, *held(held_at)]
    with struck(out, 0, when=(tmp_path / "log" / "struck-1").exists, held_at=held_at):
        trained(tmp_path, *given, strategy=strategy, options=COPIES, elastic="1:3", eval_every=16)
    require_taken_over(out, 0)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    require_each_sample(out, times=2)
    require_rows_counted(out, times=None if strategy == "ps-bsp" else 2, server=1)


@pytest.mark.parametrize(("number", "server"), [(1, 1), (2, 0)], ids=["asked first", "told what counts"])
def test_a_server_dies_while_all_let_a_worker_go(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch, number: int, server: int
) -> None:
    out = tmp_path / "out"
    struck_before(monkeypatch, out, server, number)
    given = [*COUNTED, "--fail-at", f"1:26:{BEFORE_ASKING}", "--step-s", 0.02]
    trained(tmp_path, *given, strategy="ps-asp", options=COPIES, elastic="1:3", eval_every=16)
    require_taken_over(out, server)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    require_rows_counted(out, times=2, server=1 - server)


@pytest.fixture
def three_hosts(program_forks: str) -> Iterator[Network]:
    with own_network(3, program_forks) as network:
        yield network


def finish_counted(process: subprocess.Popen[str], out: Path, *, server: int = 0) -> None:
    end(process)
    assert not of(out, "left_over")
    require_rows_counted(out, times=2, samples=SAMPLES, server=server)


def servers_outlive_a_worker_in_its_step(network: Network, address: str, directory: Path, fault: str) -> None:
    """Of two servers elsewhere one may lack a message of the worker's."""
    given = [*COUNTED, "--fail-at", f"2:{fault}"]
    options = ["--strategy", "ps-asp", "--option", "servers=2"]
    process, out = begin(network, address, directory, *given, workers=3, samples=SAMPLES, step_s=0.02, options=options)
    finish_counted(process, out)
    assert [event["who"] for event in of(out, "lost")] == ["worker-2"]
    require_whole(out, servers=2, gradients=2 * SAMPLES // 4)


def copies_outlive_a_worker_and_a_server(network: Network, address: str, directory: Path) -> None:
    """On the host of another worker. All wait before the end until it has died."""
    given = [*COUNTED, "--fail-at", f"2:70:{BETWEEN_SERVERS}", *held(88)]
    options = ["--strategy", "ps-asp", "--option", "servers=3", "--option", "replicas=1"]
    process, out = begin(network, address, directory, *given, workers=3, samples=SAMPLES, step_s=0.05, options=options)
    wait_for(process, out, num_steps=4)
    assert wait_until(lambda: of(out, "lost"), within_s=PATIENCE_S), said(process)
    there = host_of(network, pids(out)["worker-1"])
    (server,) = [each for each in range(3) if pids(out)[f"server-{each}"] in pids_on(there)]
    kill(out, server, signal.SIGKILL)
    (out.parent / "log" / "go-88").touch()
    finish_counted(process, out, server=(server + 1) % 3)
    assert [event["who"] for event in of(out, "lost")] == ["worker-2"]
    assert [event["who"] for event in of(out, "server_lost")] == [f"server-{server}"]


@pytest.mark.timeout(1800)
def test_rows_outlive_workers_between_hosts(three_hosts: Network, tmp_path: Path) -> None:
    address = three_hosts.start_ray()
    pushing, asked = (
        [f"{number}:{BETWEEN_SERVERS}" for number in range(60, 64)],
        [f"{number}:{ANSWERED}" for number in (42, 43)],
    )
    for number, fault in enumerate([*pushing, *asked]):
        servers_outlive_a_worker_in_its_step(three_hosts, address, tmp_path / f"step-{number}", fault)
    copies_outlive_a_worker_and_a_server(three_hosts, address, tmp_path / "copies")
