"""Servers that hold rows of tables are killed while workers train: with replicas no row is another one for it."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nn import ShardedEmbedding
from paceline.running import resuming
from paceline.running.launch import Quiet
from paceline.server.tables.spec import TableSpec
from paceline.server.tables.table import Table
from paceline.training.snapshot import read_model_file
from tests.covering import stood_for
from tests.distributed.harness import events

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
WORKERS, BATCH, DIM, NUM_KEYS = 2, 8, 4, 150


class Kill(NamedTuple):
    at: int
    """A step of the first worker."""
    server: int
    wanted: Mapping[str, int] = MappingProxyType({})
    """It waits there until there are so many of these events."""


def model_of(optimizer: str) -> nn.Sequential:
    table = ShardedEmbedding(2**50, DIM, optimizer=optimizer, std=0.0 if optimizer == EXACT else 1.0, name="users")
    return nn.Sequential(table, nn.Linear(DIM, 16))


def spec_of(optimizer: str) -> TableSpec:
    table = model_of(optimizer)[0]
    assert isinstance(table, ShardedEmbedding)
    return table.spec


def keys_of(num_steps: int) -> Tensor:
    return (
        torch.randint(0, NUM_KEYS, (num_steps * WORKERS * BATCH,), generator=torch.Generator().manual_seed(3)) * 2**40
    )


EXACT = "sgd:lr=1"
"""Beside a loss whose gradient of a row is how often the batch has its key."""


def train(optimizer: str, num_steps: int, out: Path, kills: Sequence[Kill] = ()) -> None:
    torch.manual_seed(1)
    worker, model = paceline.init(), model_of(optimizer)
    loader = DataLoader(TensorDataset(keys_of(num_steps)), batch_size=BATCH)
    model, dense, loader = worker.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), loader)
    due = {kill.at: kill for kill in kills} if worker.rank == 0 else {}
    for number, (keys,) in enumerate(loader):
        dense.zero_grad()
        if number in due:
            strike(out, due[number])
        if optimizer == EXACT:
            (model[0](keys).sum() + model[1](torch.ones(DIM)).sum()).backward()
        else:
            model(keys).square().mean().backward()
        dense.step()
        time.sleep(0.005)


def strike(out: Path, kill: Kill) -> None:
    """Kill it soon, whatever it is doing then. The launcher has heard of steps: deaths before the first end a run."""
    server = kill.server
    while any(len(named(out, name)) < count for name, count in kill.wanted.items()):
        time.sleep(0.05)
    path = out / "steps.csv"
    while not path.exists() or len(path.read_text().splitlines()) < 3:
        time.sleep(0.05)
    time.sleep(1.0)  # word of a step follows its record
    pids = json.loads((out / "events.jsonl").read_text().splitlines()[0])["details"]["pids"]
    delay_s = random.Random(server).uniform(0.0, 0.03)
    threading.Timer(delay_s, os.kill, (pids[f"server-{server}"], signal.SIGKILL)).start()


def run(strategy: str, program: Any, out: Path, *, servers: int, replicas: int, **settings: Any) -> None:
    options = {"servers": servers, "replicas": replicas, **settings.pop("options", {})}
    paceline.run(
        program, strategy=strategy, workers=WORKERS, options=options, out=out, device="cpu", watcher=Quiet(),
        **settings,
    )  # fmt: skip


def rows_of(out: Path) -> dict[str, Tensor]:
    return {name.removeprefix("users."): rows for name, rows in read_model_file(out / "rows.safetensors").items()}


def rows_in_files(out: Path, optimizer: str) -> dict[str, Tensor]:
    """Of the newest checkpoint."""
    saved, table = resuming.find(out).checkpoint, Table(spec_of(optimizer))
    table.load_files(out / saved.rows_directory, saved.row_files["users"])
    return table.state()


def assert_equal(own: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(own, expected, rtol=0, atol=0)


def named(out: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in events(out) if event["name"] == name]


def lost(out: Path) -> list[str]:
    return [event["who"] for event in named(out, "server_lost")]


@pytest.mark.parametrize("optimizer", [stood_for("sgd:lr=0.1"), "adagrad:lr=0.1"])  # which has a state besides
def test_rows_are_those_of_the_undisturbed_run_with_a_death_in_each_quarter(tmp_path: Path, optimizer: str) -> None:
    whole, out, num_steps = tmp_path / "whole", tmp_path / "out", 80
    run("ps-bsp", partial(train, optimizer, num_steps, whole), whole, servers=5, replicas=0)
    kills = [Kill(10 + 20 * quarter, server) for quarter, server in enumerate((3, 0, 4, 1))]
    run("ps-bsp", partial(train, optimizer, num_steps, out, kills), out, servers=5, replicas=4)
    assert lost(out) == [f"server-{kill.server}" for kill in kills]
    wanted = rows_of(whole)
    assert len(wanted["keys"]) == NUM_KEYS
    assert_equal(rows_of(out), wanted)
    assert_equal(read_model_file(out / "model.safetensors"), read_model_file(whole / "model.safetensors"))


@pytest.mark.parametrize("strategy", ["ps-asp", stood_for("ps-ssp")])
def test_every_gradient_of_a_row_counts_once(tmp_path: Path, strategy: str) -> None:
    out, num_steps = tmp_path / "out", 60
    kills = [Kill(15, 1), Kill(45, 0)]
    run(strategy, partial(train, EXACT, num_steps, out, kills), out, servers=3, replicas=2)
    assert lost(out) == ["server-1", "server-0"]
    keys, counts = keys_of(num_steps).unique(return_counts=True)
    found = rows_of(out)
    assert torch.equal(found["keys"], keys)
    assert torch.equal(found["rows"], -counts.float()[:, None].expand(-1, DIM))


def test_rows_in_files_outlive_servers_before_a_checkpoint_and_after_it_is_resumed(tmp_path: Path) -> None:
    optimizer, num_steps, tables = "adagrad:lr=0.1", 40, {"table_dir": str(tmp_path / "tables"), "table_mbytes": 1}
    whole, before, after = (tmp_path / name for name in ("whole", "before", "after"))
    run("ps-bsp", partial(train, optimizer, num_steps, whole), whole, servers=2, replicas=0)
    run(
        "ps-bsp", partial(train, optimizer, num_steps, before, [Kill(8, 1)]), before, servers=2, replicas=1,
        options=tables, max_steps=20, checkpoint_every=5,
    )  # fmt: skip
    run(
        "ps-bsp", partial(train, optimizer, num_steps, after, [Kill(8, 0)]), after, servers=3, replicas=1,
        options=tables, resume=before, checkpoint_every=5,
    )  # fmt: skip
    assert (lost(before), lost(after)) == (["server-1"], ["server-0"])
    assert_equal(rows_in_files(after, optimizer), rows_of(whole))


@pytest.mark.parametrize("is_in_files", [False, True], ids=["in memory", "in files"])
def test_rows_are_copied_anew(tmp_path: Path, is_in_files: bool) -> None:
    """Each key range has two copies, and lives through the deaths of both that had it at first."""
    optimizer, num_steps, whole, out = "adagrad:lr=0.1", 300, tmp_path / "whole", tmp_path / "out"
    tables = {"table_dir": str(tmp_path / "tables"), "table_mbytes": 1} if is_in_files else {}
    run("ps-bsp", partial(train, optimizer, num_steps, whole), whole, servers=3, replicas=0)
    kills = [Kill(10, 1), Kill(200, 0, {"copied": 2})]
    run("ps-bsp", partial(train, optimizer, num_steps, out, kills), out, servers=3, replicas=1, options=tables)
    assert lost(out) == ["server-1", "server-0"]
    assert not named(out, "not_copied")
    assert {event["details"]["key_range"] for event in named(out, "copied")} == {1, 2}
    assert {event["details"]["key_range"] for event in named(out, "taken_over") if event["who"] == "server-2"} == {0, 1}
    assert_equal(rows_in_files(out, optimizer) if is_in_files else rows_of(out), rows_of(whole))
    assert_equal(read_model_file(out / "model.safetensors"), read_model_file(whole / "model.safetensors"))


def test_rows_go_to_a_server_that_joins(tmp_path: Path) -> None:
    """It is given both key ranges, serves one of them while the last server of the start lives, and then both."""
    optimizer, num_steps, whole, out = "adagrad:lr=0.1", 220, tmp_path / "whole", tmp_path / "out"
    run("ps-bsp", partial(train, optimizer, num_steps, whole), whole, servers=2, replicas=0)
    kills = [Kill(10, 0), Kill(200, 1, {"copied": 2, "taken_over": 2})]
    run(
        "ps-bsp", partial(train, optimizer, num_steps, out, kills), out, servers=2, replicas=1, elastic="1:2",
        replace=1, start_deadline_s=500,
    )  # fmt: skip
    assert lost(out) == ["server-0", "server-1"]
    assert not named(out, "not_copied") + named(out, "not_handed_over")
    assert [event["who"] for event in named(out, "taken_over")] == ["server-1", "server-2", "server-2"]
    assert_equal(rows_of(out), rows_of(whole))
