"""Workers spread over local processes: the same run as in one process, bit for bit, and the same ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.cluster.description import Cluster
from paceline.errors import RunFailed, UsageError
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance.rows import Row, every_row, loader_of, network, prepared, problem, step, train
from tests.conformance.test_virtual import train_with_noise
from tests.conformance.virtual_cluster import SCRIPT, STEP_S, cluster_of, run

NUM_WORKERS, NUM_PROCESSES = 5, 2
UNEVEN = cluster_of(gbit_per_s=0.01, latency_us=100.0, distribution="exponential", placement="with workers")
TIED = cluster_of(gbit_per_s=1000.0)
"""All workers do everything at the same times, so that only their order tells whose turn it is."""


def content(directory: Path) -> dict[str, bytes]:
    """Of a result directory's files."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.suffix != ".kept"}


def require_same(script: Any, out: Path, strategy: str, workers: int, **settings: Any) -> None:
    for num_processes in (1, NUM_PROCESSES):
        run(script, out / str(num_processes), strategy, workers, num_processes=num_processes, **settings)
    one, several = content(out / "1" / "run"), content(out / str(NUM_PROCESSES) / "run")
    assert "steps.csv" in one
    for name in {*one, *several}:
        assert several.get(name) == one.get(name), name


# --- the same run ----------------------------------------------------------------------------------------------------


@every_row
@pytest.mark.parametrize("cluster", [UNEVEN, TIED], ids=["uneven", "tied"])
def test_processes_make_no_difference(row: Row, cluster: Cluster, tmp_path: Path) -> None:
    workers = max(row.workers, NUM_WORKERS) if row.workers > 1 else 1
    require_same(
        train_with_noise, tmp_path, row.strategy, workers, options=row.options, cluster=cluster, eval_every=4, seed=3
    )


@pytest.mark.parametrize("algorithm", ["ring", "tree", "all-to-all"])
def test_nor_for_algorithms_over_messages(algorithm: str, tmp_path: Path) -> None:
    require_same(train, tmp_path, "all-reduce", 4, options={"algorithm": algorithm}, cluster=UNEVEN)


def deep(worker: Worker, out: Path) -> None:
    """Several buckets, which leave while backward goes on, and a pass without exchange before each."""
    model = nn.Sequential(nn.Linear(10, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 4))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for x, y, _ in loader:
        with worker.no_sync():
            model(x).square().mean().backward()
        step(worker, model, optimizer, x, y)


def test_nor_for_buckets(tmp_path: Path) -> None:
    require_same(deep, tmp_path, "all-reduce", 3, options={"bucket_mb": 0.01}, cluster=UNEVEN)


def exchange_everything(worker: Worker, out: Path) -> None:
    """Every way in which scripts talk to each other, with tensors that no one has allocated."""
    rank, size = worker.rank, worker.size
    mine = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)
    found = [
        worker.all_reduce(mine.clone(), op="max"),
        worker.broadcast(torch.full((2, 2), rank, dtype=torch.int16), root=1),
        *worker.all_gather(torch.ones(rank)),
        *(worker.gather(torch.tensor(rank), root=2) or ()),
        worker.scatter([torch.full((3,), i) for i in range(size)] if rank == 0 else None),
        worker.reduce_scatter([torch.full((i + 1,), float(rank)) for i in range(size)]),
        *worker.all_to_all([torch.tensor([rank, i]) for i in range(size)]),
        torch.tensor([each["rank"] for each in worker.all_gather_object({"rank": rank})]),
        torch.tensor(worker.broadcast_object([rank, "x"], root=1)[0]),
    ]
    if rank == 0:
        worker.send(torch.ones(3, dtype=torch.bfloat16), destination=1)
    if rank == 1:
        found.append(worker.recv(torch.zeros(3, dtype=torch.bfloat16), source=0))
    worker.barrier()
    worker.log(**{f"exchange_{number}": tensor.double().sum() for number, tensor in enumerate(found)})
    tiny_steps(worker)


def tiny_steps(worker: Worker) -> None:
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)


def test_nor_for_what_scripts_say_to_each_other(tmp_path: Path) -> None:
    require_same(exchange_everything, tmp_path, "all-reduce", 3, cluster=UNEVEN, max_steps=3)


def test_nor_for_a_run_that_goes_on(tmp_path: Path) -> None:
    run(train_with_noise, tmp_path / "before", "ps-asp", 3, cluster=UNEVEN, max_steps=10)
    before = tmp_path / "before" / "run"
    require_same(train_with_noise, tmp_path, "ps-asp", 3, cluster=UNEVEN, max_steps=20, resume=before)


class AveragedFeatures(nn.Module):
    """Its forward pass needs all workers', as contrastive losses and synchronised batch norm do."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.first, self.last, self.worker = nn.Linear(10, 16), nn.Linear(16, 4), worker

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x)
        others = torch.stack(self.worker.all_gather(features.detach()))
        return self.last(features - others.mean())


def train_with_exchange_in_forward(worker: Worker, out: Path) -> None:
    model = AveragedFeatures(worker)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)


def test_nor_for_what_is_exchanged_in_a_forward_pass(tmp_path: Path) -> None:
    require_same(train_with_exchange_in_forward, tmp_path, "all-reduce", 3, cluster=UNEVEN)


class Talking(Dataset[Any]):
    """Its samples are read, with a word, by processes that the loader forks."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        print("reads", index)
        return torch.ones(10) * index, index % 4


def train_while_others_talk(worker: Worker, out: Path) -> None:
    model = network()
    loader = DataLoader(Talking(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    is_over = threading.Event()

    def talk() -> None:
        while not is_over.wait(0.001):
            print("a thread's word")

    talker = threading.Thread(target=talk)
    talker.start()
    for _ in range(3):
        for x, y in loader:
            step(worker, model, optimizer, x, y)
    is_over.set()
    talker.join()
    print("an end without a newline", end="")


def test_nor_for_what_loaders_and_threads_print(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Processes that the script has forked have no part in what their parent says."""
    require_same(train_while_others_talk, tmp_path, "all-reduce", 2, cluster=UNEVEN)


@pytest.mark.parametrize("limits", [{"target": "draw=0.999"}, {"max_time_s": 0.2}], ids=["target", "time"])
def test_nor_for_what_ends_a_run(limits: dict[str, Any], tmp_path: Path) -> None:
    require_same(train_with_noise, tmp_path, "ps-ssp", 3, cluster=UNEVEN, eval_every=2, **limits)


# --- ends ------------------------------------------------------------------------------------------------------------


def fail_in_the_third_step(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader):
        if worker.rank == 3 and number == 2:
            raise KeyError("nothing of that name")
        step(worker, model, optimizer, x, y)


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
def test_a_failure_is_told_as_ever(strategy: str, tmp_path: Path) -> None:
    told = []
    for num_processes in (1, NUM_PROCESSES):
        out = tmp_path / str(num_processes)
        with pytest.raises(RunFailed) as failure:
            run(fail_in_the_third_step, out, strategy, 4, cluster=UNEVEN, num_processes=num_processes)
        told.append(str(failure.value))
    assert told[0].startswith("worker 3 failed after step 2: KeyError: 'nothing of that name'")
    assert "in fail_in_the_third_step" in told[0]
    assert told[0] == told[1]


def test_a_process_that_dies_ends_the_run(tmp_path: Path) -> None:
    def script(worker: Worker, out: Path) -> None:
        model, optimizer, loader = prepared(worker)
        for number, (x, y, _) in enumerate(loader):
            if worker.rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            step(worker, model, optimizer, x, y)

    with pytest.raises(RunFailed, match=r"worker 1 died during step 4\n(.*\n)*process \d+ was ended by SIGKILL"):
        run(script, tmp_path, "all-reduce", 4, cluster=TIED, num_processes=2)
    lost = [event for event in Result(tmp_path / "run").events if event.name == "lost"]
    assert lost[0].details["members"] == ["worker-1", "worker-3"]
    assert "SIGKILL" in lost[0].details["reason"]


def test_a_host_that_fails_ends_the_run_as_ever(tmp_path: Path) -> None:
    cluster = cluster_of(failures_per_hour=3600.0 / (STEP_S * 10))
    told = []
    for num_processes in (1, NUM_PROCESSES):
        out = tmp_path / str(num_processes)
        with pytest.raises(RunFailed, match=r"(worker|server) \d died") as failure:
            run(train_with_noise, out, "ps-asp", 4, cluster=cluster, num_processes=num_processes, eval_every=2, seed=2)
        events = Result(out / "run").events
        assert [event.name for event in events][-2:] == ["lost", "failed"]
        told.append(str(failure.value).split(" during ")[0])
    assert told[0] == told[1]


def test_nothing_stays_open(tmp_path: Path) -> None:
    counts = []
    for number in range(3):
        run(train, tmp_path / str(number), "ps-bsp", 4, cluster=TIED, num_processes=2, options={"servers": 2})
        gc.collect()
        counts.append(psutil.Process().num_fds())
    assert counts[1] == counts[2]


# --- asking for it ---------------------------------------------------------------------------------------------------


def test_a_script_is_spread_and_its_output_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}    import os; print('computed by', os.getpid())\n")
    result = paceline.run(
        script,
        strategy="ps-bsp",
        workers=4,
        arguments=["0.1"],
        engine="virtual",
        cluster="lab-1gbe",
        processes=2,
        device="cpu",
        out=tmp_path / "run",
    )
    assert result.manifest["processes"] == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "computed by" in line]
    assert sorted(line.split("]")[0] for line in lines) == [f"[worker-{rank}" for rank in range(4)]
    pids = {int(line.split()[-1]) for line in lines}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_function_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(RunFailed, match=r"UsageError: the function cannot be sent to other processes: .*lock"):
        run(lambda worker, out: lock, tmp_path, "all-reduce", 2, cluster=TIED, num_processes=2)


def test_what_fails_before_the_script_begins_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed, match="worker 0 failed after step 0: ModuleNotFoundError: No module named 'not_there'"
    ):
        run(NotThere(), tmp_path, "all-reduce", 2, cluster=TIED, num_processes=2)


class NotThere:
    """Comes from a module that only this process has."""

    def __call__(self, worker: Worker, out: Path) -> None: ...

    def __reduce__(self) -> Any:
        return __import__, ("not_there",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": 2}, "--processes has no effect on real workers"),
        ({"engine": "virtual", "cluster": "published", "processes": 0}, "--processes must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        paceline.run(train, out=tmp_path / "run", **settings)
