"""Tables in mapped files: the rows that memory would have, in a memory that stays small."""

from __future__ import annotations

import errno
import os
import re
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.storage import InFiles, TableFiles
from paceline.server.tables.table import Table
from paceline.strategies import build
from tests.forks import FORKS

BATCHES = st.lists(st.sets(st.integers(0, 400), min_size=1, max_size=120), min_size=1, max_size=5)
SMALL = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def spec_of(optimizer: str, *, dim: int = 3, std: float = 1.0) -> TableSpec:
    return TableSpec("users", 2**60, dim, of_text(optimizer), std, seed=4)


def gradients_of(keys: set[int], dim: int, seed: int) -> RowGradients:
    values = torch.randn(len(keys), dim, generator=torch.Generator().manual_seed(seed))
    return RowGradients(torch.tensor(sorted(keys)) * 12345, values)


@pytest.mark.parametrize("optimizer", ["row-wise-adagrad", "adagrad:initial=0.5"])
@SMALL
@given(batches=BATCHES)
def test_rows_are_those_of_memory(
    optimizer: str, batches: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a batch is looked at in pieces, and pages are given back after each."""
    monkeypatch.setattr(InFiles, "piece_bytes", 7 * 12)
    spec = spec_of(optimizer)
    tables = [Table(spec), Table(spec, InFiles(TableFiles(str(tmp_path), resident_bytes=-1)))]
    for number, keys in enumerate(batches):
        for table in tables:
            table.update(gradients_of(keys, spec.dim, number))
    tables.append(Table(spec, InFiles(TableFiles(str(tmp_path), resident_bytes=1 << 20))))
    tables[-1].load(tables[1].state())
    every = torch.arange(401) * 12345
    for other in tables[1:]:
        assert torch.equal(other.read(every), tables[0].read(every))
        torch.testing.assert_close(other.state(), tables[0].state(), rtol=0, atol=0)


@pytest.mark.slow
def test_memory_stays_small(tmp_path: Path) -> None:
    """50 MB of rows, of which 8 may be resident, in a process of its own."""
    connection, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_fill, args=(str(tmp_path), 8_000_000, theirs), daemon=True)
    process.start()
    theirs.close()  # so that its end is noticed
    (anonymous, mapped), rows_sum = connection.recv()
    process.join()
    assert rows_sum == -float(ROWS_OF_FOUR_KB * 1024)
    assert anonymous < 25_000
    assert mapped < 8_000 + 25_000


def test_small_reads_give_pages_back_too(tmp_path: Path) -> None:
    table = Table(spec_of("sgd:lr=1", dim=64), InFiles(TableFiles(str(tmp_path), resident_bytes=-(1 << 40))))
    keys = torch.arange(1000)
    table.update(RowGradients(keys, torch.ones(1000, 64)))
    for some in keys[:20].split(10):
        table.read(some)
        assert _resident_kb_of_files(tmp_path) == 0


def _resident_kb_of_files(directory: Path) -> int:
    """Those that this process has mapped (proc(5), smaps)."""
    entries = re.findall(
        rf"^\S+ \S+ \S+ \S+ \S+ +{re.escape(str(directory))}/.*\n(?:.*\n)*?Rss: +(\d+) kB$",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    assert entries
    return sum(map(int, entries))


ROWS_OF_FOUR_KB = 12_500


def _fill(directory: str, resident_bytes: int, connection: Connection) -> None:
    table = Table(spec_of("sgd:lr=1", dim=1024, std=0.0), InFiles(TableFiles(directory, resident_bytes)))
    gradients = torch.ones(500, 1024)
    table.update(RowGradients(torch.arange(500), gradients))  # what a first update loads
    before, most = _resident_kb(), [0, 0]
    for keys in torch.arange(500, ROWS_OF_FOUR_KB).split(500):
        table.update(RowGradients(keys, gradients))
        most = [max(pair) for pair in zip(most, _grown(before), strict=True)]
    total = 0.0
    for keys in torch.arange(ROWS_OF_FOUR_KB).flip(0).split(500):
        total += float(table.read(keys).sum())
        most = [max(pair) for pair in zip(most, _grown(before), strict=True)]
    connection.send((most, total))


def _grown(before: list[int]) -> list[int]:
    return [now - then for now, then in zip(_resident_kb(), before, strict=True)]


def _resident_kb() -> list[int]:
    """RssAnon and RssFile of this process (proc(5), status)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(status[name].split()[0]) for name in ("RssAnon", "RssFile")]


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, "No space left on device; .*table_dir=DIR"),
        (errno.EMFILE, r"Too many open files; .*\(ulimit -n\)"),
        (errno.ENOMEM, r"Cannot allocate memory; .*max_map_count"),
    ],
)
def test_no_room_is_named_before_a_write_kills(
    number: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(spec_of("sgd", dim=64), InFiles(TableFiles(str(tmp_path), 1 << 30)))
    keys = torch.arange(20_000)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    gradients = RowGradients(keys, torch.zeros(len(keys), 64))
    with pytest.raises(UsageError, match=f"in {tmp_path}: {error}"):
        table.update(gradients)


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"in {tmp_path}/file: "):
        InFiles(TableFiles(str(tmp_path / "file"), 1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"table_dir": "here"}, "table_dir must be an absolute path"),
        ({"table_mbytes": "5"}, "needs table_dir=DIR"),
        ({"table_dir": "/tmp/x", "table_mbytes": "0"}, "table_mbytes=0 must be above 0"),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        build("ps-asp", options)


def test_the_bound_reaches_the_servers() -> None:
    plan = build("ps-asp", {"table_dir": "/tmp/x", "table_mbytes": "5"})
    assert plan.table_files() == TableFiles("/tmp/x", 5_000_000)


@pytest.mark.parametrize(("replicas", "resident_bytes"), [(0, 60_000_000), (2, 20_000_000)])
def test_the_key_ranges_of_a_server_share_its_memory(replicas: int, resident_bytes: int) -> None:
    """Each one gives its pages back by a bound of its own."""
    strategy = build("ps-asp", {"servers": 3, "replicas": replicas, "table_dir": "/rows", "table_mbytes": 60.0})
    assert strategy.table_files() == TableFiles("/rows", resident_bytes)
