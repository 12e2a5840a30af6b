"""Checkpoints whose rows servers have written themselves: what is resumed from them, and what becomes of damage."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import RunFailed
from paceline.nn import ShardedEmbedding
from paceline.running import resuming
from paceline.running.launch import Quiet
from paceline.server.tables.table import Table
from paceline.training.snapshot import read_model_file

NUM_STEPS, WORKERS, DIM = 24, 2, 4


def model_of() -> nn.Sequential:
    table = ShardedEmbedding(2**50, DIM, optimizer="row-wise-adagrad:lr=0.1", name="users")
    return nn.Sequential(table, nn.Linear(DIM, 16))


def train(kills_at: int | None = None) -> None:
    torch.manual_seed(1)
    worker, model = paceline.init(), model_of()
    keys = torch.randint(0, 200, (NUM_STEPS * WORKERS * 8,)) * 2**40
    model, optimizer, loader = worker.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(keys), batch_size=8)
    )
    for number, (some,) in enumerate(loader):
        optimizer.zero_grad()
        model(some).square().mean().backward()
        optimizer.step()
        if number == kills_at and worker.rank == 0:
            kill_servers()


def kill_servers() -> None:
    """Those of this run, which have the same parent as its workers."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            is_server = b"ServerActor" in (path / "cmdline").read_bytes()
        except OSError:
            continue
        if is_server and parent == os.getppid():
            os.kill(int(path.name), signal.SIGKILL)


def run(program: Any, out: Path, tables: Path | None, *, servers: int = 2, **settings: Any) -> None:
    options: dict[str, Any] = {"servers": servers}
    if tables is not None:
        options |= {"table_dir": str(tables), "table_mbytes": 1}
    paceline.run(
        program, strategy="ps-bsp", workers=WORKERS, options=options, out=out, checkpoint_every=5, device="cpu",
        watcher=Quiet(), **settings,
    )  # fmt: skip


VIRTUAL = {"engine": "virtual", "cluster": "lab-1gbe"}


def rows_in(directory: Path) -> dict[str, Tensor]:
    """Of the newest checkpoint."""
    checkpoint = resuming.find(directory).checkpoint
    table = Table(model_of()[0].spec)  # type: ignore[arg-type, union-attr]
    table.load_files(directory / checkpoint.rows_directory, checkpoint.row_files["users"])
    return table.state()


def rows_of_memory(out: Path, **settings: Any) -> dict[str, Tensor]:
    """What the same run has in memory at its end."""
    run(train, out, None, **settings)
    return {name.removeprefix("users."): rows for name, rows in read_model_file(out / "rows.safetensors").items()}


def names_of_rows(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("rows*")}


@pytest.mark.slow
def test_a_damaged_part_has_the_one_before_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = rows_of_memory(tmp_path / "memory", **VIRTUAL)
    out = tmp_path / "run"
    run(train, out, tmp_path / "tables", **VIRTUAL)
    torch.testing.assert_close(rows_in(out), wanted)
    newest = resuming.find(out).checkpoint
    assert len(names_of_rows(out)) == 2  # as many as checkpoints are kept
    file = out / newest.rows_directory / newest.row_files["users"][1][0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = resuming.find(out)
    assert found.checkpoint.iteration < newest.iteration
    assert "is damaged" in found.warnings[0]
    run(train, tmp_path / "other", tmp_path / "tables", servers=3, resume=out, **VIRTUAL)
    torch.testing.assert_close(rows_in(tmp_path / "other"), wanted)


def go_on_by_itself(out: Path, state: Path) -> None:
    """As a framework does, whose checkpoints are its own."""
    torch.manual_seed(1)
    worker, model = paceline.init(), model_of()
    keys = torch.arange(80) * 2**40
    model, optimizer, loader = worker.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(keys), batch_size=8)
    )
    if state.exists():
        worker.load_run_state(state.read_bytes())
    else:
        for (some,) in loader:
            optimizer.zero_grad()
            model(some).square().mean().backward()
            optimizer.step()
    with worker.meeting("the state"), worker.global_model():
        saved = worker.run_state()
    if worker.rank == 0:
        torch.save(model[0].rows(), out)
        state.write_bytes(saved)


@pytest.mark.slow
def test_a_state_that_is_handed_over_has_the_rows(tmp_path: Path) -> None:
    for name in ("before", "after"):
        run(
            partial(go_on_by_itself, tmp_path / name, tmp_path / "state"),
            tmp_path / "run",
            tmp_path / "tables",
            **VIRTUAL,
        )
        shutil.rmtree(tmp_path / "run")
    before, after = (torch.load(tmp_path / name) for name in ("before", "after"))
    assert len(before["keys"]) == 80
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.slow
def test_the_last_one_must_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunFailed, match="cannot write rows: server 0: No space left on device"):
        run(train, tmp_path / "run", tmp_path / "tables", max_steps=3, **VIRTUAL)


def test_a_full_disk_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, write = tmp_path / "run", Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.parent.name.startswith("rows-10-") and "server-1" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    run(train, out, tmp_path / "tables", max_steps=14, keep_checkpoints=9, **VIRTUAL)
    said = "".join(capfd.readouterr())
    assert "the checkpoint of iteration 10 is not saved, and the run goes on: cannot write rows: server 1: " in said
    assert "No space left on device" in said
    assert {name.split("-")[1] for name in names_of_rows(out)} == {"5", "14"}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_here")
def test_servers_that_are_killed_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    """SIGKILL takes both servers; the run goes on with three, and comes to the same rows."""
    wanted = rows_of_memory(tmp_path / "memory", **VIRTUAL)
    out = tmp_path / "run"
    with pytest.raises(RunFailed, match="server"):
        run(partial(train, kills_at=17), out, tmp_path / "tables")
    assert resuming.find(out).checkpoint.iteration >= 10
    run(train, out, tmp_path / "tables", servers=3, resume=out)
    torch.testing.assert_close(rows_in(out), wanted)
