"""A table larger than the memory that servers may use for it: rows are made, updated and saved.

One worker makes `--gbyte` of rows of 1,024 float32 (row-wise Adagrad, rows begin at 0) on four servers whose tables lie
in mapped files, and then updates rows drawn among them. The servers' RssAnon and RssFile (proc(5), status) are read
ten times a second. Checkpoints are written by the servers. In the end some rows are compared with what so many updates
make of them. With `--kill` all processes of the run are killed once it has three checkpoints, and it is resumed.

    python benchmarks/large_table.py --gbyte 2 --mbytes 100 --table-dir /var/tmp/tables --kill
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import checkpoint_files
from paceline.checkpoint import FILE_NAME
from paceline.nn import ShardedEmbedding
from paceline.running.launch import Quiet

DIM, BATCH, SERVERS, DRAWN, LR = 1024, 4096, 4, 40, 0.1
NUM_CHECKPOINTS, NUM_COMPARED = 4, 1000


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


def keys_of(gbyte: float) -> Tensor:
    """Of all samples, in their order: each row once, and then some again."""
    num_rows = int(gbyte * 1e9 / (4 * DIM)) // BATCH * BATCH
    drawn = torch.randint(0, num_rows, (DRAWN * BATCH,), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.arange(num_rows), drawn]) * 12345


def train(gbyte: float) -> None:
    worker, keys = paceline.init(), keys_of(gbyte)
    table = ShardedEmbedding(2**60, DIM, optimizer=f"row-wise-adagrad:lr={LR}", name="large", std=0.0)
    model: nn.Module = nn.Sequential(table, dense := nn.Linear(1, 1))
    loader = DataLoader(TensorDataset(keys), batch_size=BATCH)
    model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    began_s, num = time.perf_counter(), 0
    for (some,) in loader:
        optimizer.zero_grad()
        (table(some).sum() + dense.weight.sum() + dense.bias.sum()).backward()
        optimizer.step()
        num += len(some)
    print(f"{num:,} rows, {num / (time.perf_counter() - began_s):,.0f} a second")
    compare(table, keys)


@torch.no_grad()
def compare(table: ShardedEmbedding, keys: Tensor) -> None:
    """Some of the rows that were drawn again, and some that were not, with what Adagrad makes of their gradients, which
    are as many ones as a batch has of the key."""
    asked = torch.cat([keys[-NUM_COMPARED:].unique(), keys[:NUM_COMPARED]])
    wanted, squares = torch.zeros(2, len(asked), dtype=torch.float64)
    for batch in keys.split(BATCH):
        ordered = batch.sort().values
        gradients = (torch.searchsorted(ordered, asked, right=True) - torch.searchsorted(ordered, asked)).double()
        squares += gradients**2
        wanted -= LR * gradients / squares.clamp(min=1e-30).sqrt()
    torch.testing.assert_close(table(asked), wanted.float()[:, None].expand(-1, DIM), rtol=1e-5, atol=1e-6)
    print(f"{len(asked):,} rows compared, which were updated up to {int(squares.max())} times")


def run(gbyte: float, mbytes: float, directory: str, *, resume: str | None = None) -> None:
    paceline.run(
        partial(train, gbyte),
        strategy="ps-asp",
        options={"servers": SERVERS, "table_dir": directory, "table_mbytes": mbytes},
        workers=1,
        device="cpu",
        watcher=Quiet(),
        checkpoint_every=checkpoints_every(gbyte),
        deadline_s=300.0 + 60.0 * gbyte,  # a server saves, or loads, its whole table before it answers
        out=f"{directory}/run",
        resume=resume,
    )


def checkpoints_every(gbyte: float) -> int:
    return len(keys_of(gbyte)) // BATCH // NUM_CHECKPOINTS


def run_and_kill(gbyte: float, mbytes: float, directory: str) -> None:
    """In a process of its own, which ends with all that come of it once the last checkpoint but one is there."""
    every, newest = checkpoints_every(gbyte), Path(directory, "run", FILE_NAME)
    command = [sys.executable, __file__, "--gbyte", str(gbyte), "--mbytes", str(mbytes), "--in", directory]
    process = subprocess.Popen(command, start_new_session=True)
    while (checkpoint_files.iteration_of(newest) or 0) < (NUM_CHECKPOINTS - 1) * every - 1:
        if process.poll() is not None:
            sys.exit("the run ended before it could be killed")
        time.sleep(0.2)
    time.sleep(2)  # rows come after the checkpoint, which are lost and made again
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.pid in ancestors(path):
                os.kill(int(path.name), signal.SIGKILL)
    process.kill()
    process.wait()
    print(f"killed after the checkpoint of iteration {checkpoint_files.iteration_of(newest)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbyte", type=float, default=2.0)
    parser.add_argument("--mbytes", type=float, default=100.0)
    parser.add_argument("--table-dir", default="/var/tmp", help="not in memory, as /tmp may be")
    parser.add_argument("--kill", action="store_true", help="kill the run, and resume it")
    parser.add_argument("--in", dest="directory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.directory is not None:
        run(arguments.gbyte, arguments.mbytes, arguments.directory)
        return
    with tempfile.TemporaryDirectory(dir=arguments.table_dir) as directory:
        began_s = time.perf_counter()
        with watched() as most:
            if arguments.kill:
                run_and_kill(arguments.gbyte, arguments.mbytes, directory)
            run(arguments.gbyte, arguments.mbytes, directory, resume=f"{directory}/run" if arguments.kill else None)
        newest = max(Path(directory, "run").glob("rows-*"), key=lambda path: int(path.name.split("-")[1]))
        parts = [path.stat().st_size for path in newest.iterdir()]
        print(", ".join(f"{name} of a server at most {mbytes:.0f} MB" for name, mbytes in most.items()))
        print(f"{time.perf_counter() - began_s:.0f} s in all; {len(parts)} files of rows, {sum(parts) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
