"""Workers that are processes and share one GPU: their tensors meet in the host's memory."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

import paceline
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.errors import RunFailed
from paceline.nn import Adagrad, ShardedEmbedding
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance.rows import (
    ROWS,
    SELDOM,
    Row,
    keep,
    kept,
    launched,
    loader_of,
    network,
    prepared,
    problem,
    step,
)
from tests.conformance.test_resume import train_everything

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.usefixtures("ray_here")]
every_strategy = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
ROW = {row.name: row for row in ROWS}
SYNCHRONOUS = [
    row
    for row in ROWS
    if row.is_deterministic and row.is_exact and not row.workers_differ and "codec" not in row.options
]


def run(row: Row, script: Any, out: Path, *, device: str = "cuda", **settings: Any) -> Result:
    program = partial(launched, script, out, turns=row.turns)
    out.mkdir(parents=True, exist_ok=True)
    return paceline.run(
        program,
        strategy=row.strategy,
        workers=row.workers,
        options=row.options,
        out=out / "run",
        device=device,  # type: ignore[arg-type]
        deadline_s=60.0,
        **settings,
    )


def require_learning(result: Result, *, within: float = 0.9) -> None:
    """Losses of the last quarter are less than this part of those of the first."""
    losses = [metric.value for metric in result.logged if metric.name == "loss"]
    quarter = len(losses) // 4
    assert sum(losses[-quarter:]) < within * sum(losses[:quarter])


def train(worker: Worker, out: Path) -> None:
    """Evaluates too, on the device."""
    model, optimizer, loader = prepared(worker)
    x_all, y_all = (tensor.to(worker.device) for tensor in problem().tensors[:2])

    @worker.evaluation
    @torch.inference_mode()
    def accuracy(model: nn.Module) -> dict[str, float]:
        return {"accuracy": float((model(x_all).argmax(1) == y_all).float().mean())}

    for _ in range(4):
        for x, y, _ in loader:
            worker.log(is_gpu=float(next(model.parameters()).is_cuda))
            step(worker, model, optimizer, x, y)


@every_strategy
def test_every_strategy_learns_on_the_gpu(row: Row, tmp_path: Path) -> None:
    result = run(row, train, tmp_path, eval_every=10, checkpoint_every=SELDOM)
    assert {metric.value for metric in result.logged if metric.name == "is_gpu"} == {1.0}
    require_learning(result)
    assert result.metrics["accuracy"] > 0.5


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in SYNCHRONOUS])
def test_a_gpu_gives_what_cores_give(row: Row, tmp_path: Path) -> None:
    states = [run(row, train, tmp_path / device, device=device).model_state() for device in ("cpu", "cuda")]
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name].cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["all-reduce", "ps-bsp-3-servers", "local-sgd", "gossip"])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(name: str, tmp_path: Path) -> None:
    """The device's random numbers included: the model drops out."""
    row = ROW[name]
    whole = run(row, train_everything, tmp_path / "whole", max_steps=12)
    begun = run(row, train_everything, tmp_path / "begun", max_steps=5)
    resumed = run(row, train_everything, tmp_path / "resumed", max_steps=12, resume=begun.directory)
    assert resumed.iteration == 12
    ends = [Checkpoint.decode((result.directory / FILE_NAME).read_bytes(), where="") for result in (resumed, whole)]
    torch.testing.assert_close(ends[0].model, ends[1].model, rtol=1e-5, atol=1e-6)


def train_in_mixed_precision(worker: Worker, out: Path) -> None:
    model = network()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(4):
        for x, y, _ in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            worker.log(loss=loss, scale=scaler.get_scale())


@pytest.mark.parametrize("name", ["single", "all-reduce", "ps-bsp", "ps-asp", "gossip", "local-sgd"])
def test_mixed_precision(name: str, tmp_path: Path) -> None:
    result = run(ROW[name], train_in_mixed_precision, tmp_path)
    require_learning(result)
    assert all(math.isfinite(metric.value) and metric.value >= 1 for metric in result.logged if metric.name == "scale")


def train_compiled(worker: Worker, out: Path) -> None:
    model = network()
    model, optimizer, loader = worker.prepare(model, Adam(model.parameters(), lr=0.01), loader_of(problem()))
    compiled = torch.compile(model)
    for _ in range(4):
        for x, y, _ in loader:
            step(worker, compiled, optimizer, x, y)


@pytest.mark.parametrize("name", ["all-reduce", "ps-bsp"])
def test_a_compiled_model(name: str, tmp_path: Path) -> None:
    result = run(ROW[name], train_compiled, tmp_path)
    require_learning(result)


def overflow(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader, 1):
        loss = F.cross_entropy(model(x), y)
        if number == 3 and worker.rank == worker.size - 1:
            loss = loss + model.get_parameter("2.bias").sum() * torch.nan
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["all-reduce", "ps-bsp", "ps-asp", "local-sgd", "gossip"])
def test_a_gradient_that_is_not_finite_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"2\.bias"):
        run(ROW[name], overflow, tmp_path)


def exhaust(worker: Worker, out: Path) -> None:
    prepared(worker)
    torch.empty(1 << 50, device=worker.device)


def test_memory_of_the_gpu_that_runs_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="CUDA out of memory"):
        run(ROW["all-reduce"], exhaust, tmp_path)


def exchange(worker: Worker, out: Path) -> None:
    """What scripts exchange themselves."""
    mine = torch.full((1000,), worker.rank + 1.0, device=worker.device)
    assert float(worker.all_reduce(mine.clone())[0]) in (1.5, 3.0)
    everyone = worker.all_gather(mine)
    assert [float(theirs[0]) for theirs in everyone] == [1.0, 2.0]
    assert all(theirs.device == worker.device for theirs in everyone)
    assert float(worker.broadcast(mine)[0]) == 1.0
    tree = worker.all_reduce_tree({"a": mine, "b": [mine[:3], torch.ones(2)]})
    assert tree["a"].device == worker.device
    prepared(worker)


def test_exchanges_of_scripts(tmp_path: Path) -> None:
    run(ROW["all-reduce"], exchange, tmp_path)


def horovod(worker: Worker, out: Path) -> None:
    """A script of Horovod's, whose tensors lie on the GPU."""
    import paceline.horovod.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    device = worker.device
    mine = torch.full((5, 2), hvd.rank() + 1.0, device=device)
    for found, wanted in (
        (hvd.allreduce(mine, op=hvd.Sum), 3.0),
        (hvd.allreduce(mine, op=hvd.Average, compression=hvd.Compression.fp16), 1.5),
        (hvd.allgather(mine)[:5], 1.0),
        (hvd.broadcast(mine, 1), 2.0),
        (hvd.alltoall(mine[:4])[:2], 1.0),
        (hvd.reducescatter(mine[:4], op=hvd.Sum), 3.0),
        (hvd.grouped_allreduce([mine, mine.double()], op=hvd.Sum)[1].float(), 3.0),
    ):
        assert found.device == device
        assert torch.equal(found, torch.full_like(found, wanted))
    model = network().to(device)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for _ in range(30):
        x, y, _ = (tensor[hvd.rank() :: 2].to(device) for tensor in problem().tensors)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    keep(out, f"losses-{hvd.rank()}", losses)
    keep(out, f"model-{hvd.rank()}", [parameter.detach().cpu() for parameter in model.parameters()])


def test_horovods_operations(tmp_path: Path) -> None:
    run(Row("horovod", "horovod", 2), horovod, tmp_path)
    assert all(map(torch.equal, kept(tmp_path, "model-0"), kept(tmp_path, "model-1")))
    assert kept(tmp_path, "losses-0")[-1] < kept(tmp_path, "losses-0")[0]


def embed(worker: Worker, out: Path) -> None:
    table = ShardedEmbedding(1000, 8, optimizer=Adagrad(lr=0.1))
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(8, 4))
    model, optimizer, loader = worker.prepare(model, SGD(model[2].parameters(), lr=0.1), loader_of(problem()))
    for _ in range(4):
        for _, y, index in loader:
            step(worker, model, optimizer, index, y)


@pytest.mark.parametrize("name", ["ps-bsp", "ps-asp"])
def test_rows_on_servers(name: str, tmp_path: Path) -> None:
    result = run(ROW[name], embed, tmp_path)
    require_learning(result, within=1.0)


def two_networks(worker: Worker, out: Path) -> None:
    first, second = network(), nn.Linear(4, 4)
    first, second, one, other, loader = worker.prepare(
        first=first,
        second=second,
        one=SGD(first.parameters(), lr=0.1),
        other=Adam(second.parameters(), lr=0.01),
        loader=loader_of(problem()),
    )
    for x, y, _ in loader:
        for optimizer in (one, other):
            optimizer.zero_grad()
            F.cross_entropy(second(first(x)), y).backward()
            optimizer.step()


@pytest.mark.parametrize("name", ["all-reduce", "ps-bsp"])
def test_several_models(name: str, tmp_path: Path) -> None:
    assert run(ROW[name], two_networks, tmp_path).iteration == 12


def test_nccl_meets_and_carries(tmp_path: Path) -> None:
    """One rank: NCCL gives each of several a GPU of its own."""
    from paceline.comm.process_group.collective import connect_nccl

    collective = connect_nccl(
        dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        size=1,
        device=torch.device("cuda", 0),
        address="127.0.0.1",
        deadline_s=30.0,
    )
    mine = torch.arange(6.0, device="cuda")
    reduced = mine.clone()
    collective.all_reduce(reduced).wait()
    assert torch.equal(reduced, mine)
    on_cores = mine.cpu()
    collective.all_reduce(on_cores).wait()
    assert torch.equal(on_cores, mine.cpu())
    collective.broadcast(reduced, root=0)
    assert torch.equal(collective.all_gather(mine)[0], mine)
    assert torch.equal(collective.reduce_scatter([mine]), mine)
    assert torch.equal(collective.all_to_all([mine])[0], mine)
    assert collective.all_gather_object({"rank": 0}) == [{"rank": 0}]
    collective.barrier()
    collective.close()
