"""A table larger than the memory that servers may use for it: rows are made, updated and saved.

One worker makes `--gbyte` of rows of 1,024 float32 (row-wise Adagrad, rows begin at 0) on four servers whose tables lie
in mapped files, and then updates rows drawn among them. The servers' RssAnon and RssFile (proc(5), status) are read
ten times a second. The run's last checkpoint is written by the servers.

    python benchmarks/large_table.py --gbyte 2 --mbytes 100 --table-dir /var/tmp/tables
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nn import ShardedEmbedding
from paceline.running.launch import Quiet

DIM, BATCH, SERVERS, DRAWN = 1024, 4096, 4, 40


def resident_mbytes() -> list[tuple[float, float]]:
    """RssAnon and RssFile of each server of this run, whose processes come of this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"ServerActor" in (path / "cmdline").read_bytes() and os.getpid() in ancestors(path):
                status = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
                found.append((int(status["RssAnon"].split()[0]) / 1e3, int(status["RssFile"].split()[0]) / 1e3))
        except (OSError, KeyError):
            continue
    return found


def ancestors(path: Path) -> Iterator[int]:
    """The process ids of this process's parent, the parent's parent, and so on (proc(5), stat)."""
    while (parent := int((path / "stat").read_text().rpartition(")")[2].split()[1])) > 0:
        yield parent
        path = path.with_name(str(parent))


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """The most that one server has had so far, looked at ten times a second, also while rows are saved."""
    most, is_over = {"RssAnon": 0.0, "RssFile": 0.0}, threading.Event()

    def look() -> None:
        while not is_over.wait(0.1):
            for anonymous, mapped in resident_mbytes():
                most["RssAnon"], most["RssFile"] = max(most["RssAnon"], anonymous), max(most["RssFile"], mapped)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


def train(gbyte: float) -> None:
    worker = paceline.init()
    num_rows = int(gbyte * 1e9 / (4 * DIM))
    table = ShardedEmbedding(2**60, DIM, optimizer="row-wise-adagrad:lr=0.1", name="large", std=0.0)
    model: nn.Module = nn.Sequential(table, nn.Linear(DIM, 1))
    drawn = torch.randint(0, num_rows, (DRAWN * BATCH,))
    keys = torch.cat([torch.arange(num_rows // BATCH * BATCH), drawn])
    loader = DataLoader(TensorDataset(keys * 12345), batch_size=BATCH)
    model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    began_s = time.perf_counter()
    for (some,) in loader:
        optimizer.zero_grad()
        model(some).square().mean().backward()
        optimizer.step()
    print(f"{len(keys):,} rows, {len(keys) / (time.perf_counter() - began_s):,.0f} a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbyte", type=float, default=2.0)
    parser.add_argument("--mbytes", type=float, default=100.0)
    parser.add_argument("--table-dir", default="/var/tmp", help="not in memory, as /tmp may be")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.table_dir) as directory:
        began_s = time.perf_counter()
        with watched() as most:
            paceline.run(
                partial(train, arguments.gbyte),
                strategy="ps-asp",
                options={"servers": SERVERS, "table_dir": directory, "table_mbytes": arguments.mbytes},
                workers=1,
                device="cpu",
                checkpoint_every=10**9,
                watcher=Quiet(),
                out=f"{directory}/run",
            )
        parts = [path.stat().st_size for path in Path(directory, "run").glob("rows-*/*")]
        print(", ".join(f"{name} of a server at most {mbytes:.0f} MB" for name, mbytes in most.items()))
        print(f"{time.perf_counter() - began_s:.0f} s in all; {len(parts)} files of rows, {sum(parts) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
