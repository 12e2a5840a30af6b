"""Training on the torch.distributed backend: what DistributedDataParallel, its hooks, Join and FSDP2 make of it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline import torch_backend
from tests.unit.torch_backend_world import TorchWorld

SIZE = 2
BATCH = 6
FEATURES = 20
Parameters = list[Tensor]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchWorld]:
    with TorchWorld(SIZE, tmp_path_factory.mktemp("pair")) as world:
        yield world


class Branches(nn.Module):
    """Uses its second branch only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.second = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 5))


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """One a rank."""
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(BATCH, FEATURES, generator=generator), torch.randn(BATCH, 5, generator=generator))
        for _ in range(SIZE)
    ]


def train(
    model: nn.Module, choose: Callable[[list[tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]], num_steps: int = 4
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        x, y = choose(batches(step))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def everybody(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def trained_alone() -> Parameters:
    """With the batches of all ranks."""
    model = make_model()
    train(model, everybody)
    return parameters_of(model)


def parameters_of(model: nn.Module) -> Parameters:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(worlds: list[Parameters], expected: Parameters, *, tolerance: float = 1e-5) -> None:
    for parameters in worlds:
        torch.testing.assert_close(parameters, expected, rtol=tolerance, atol=tolerance)


def train_ddp(rank: int, bucket_mb: float, static_graph: bool) -> Parameters:
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, static_graph=static_graph)
    train(ddp, lambda parts: parts[rank])
    return parameters_of(model)


@pytest.mark.parametrize("bucket_mb", [25.0, 0.001], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("static_graph", [False, True], ids=["dynamic", "static"])
def test_ddp_equals_one_process(pair: TorchWorld, bucket_mb: float, static_graph: bool) -> None:
    assert_same(pair.run(train_ddp, bucket_mb, static_graph), trained_alone())


def train_with_hook(rank: int, name: str) -> Parameters:
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    if name == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(ddp, lambda parts: parts[rank], num_steps=6 if name == "PowerSGD" else 4)
    return parameters_of(model)


def test_a_compressing_hook(pair: TorchWorld) -> None:
    assert_same(pair.run(train_with_hook, "fp16"), trained_alone(), tolerance=2e-3)


def test_powersgd_keeps_the_replicas_equal(pair: TorchWorld) -> None:
    first, second = pair.run(train_with_hook, "PowerSGD")
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(first, parameters_of(make_model()), strict=True))


def accumulate(rank: int) -> Parameters:
    model = make_model()
    ddp = DistributedDataParallel(model)
    for step in range(3):
        x, y = batches(step)[rank]
        if step < 2:
            with ddp.no_sync():
                F.mse_loss(ddp(x), y).backward()
        else:
            F.mse_loss(ddp(x), y).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_no_sync_accumulates(pair: TorchWorld) -> None:
    model = make_model()
    for step in range(3):
        x, y = everybody(batches(step))
        F.mse_loss(model(x), y).backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert_same(pair.run(accumulate), expected)


def leave_a_branch_unused(rank: int) -> list[float]:
    """Each rank leaves the second branch out in another step; then neither uses it."""
    torch.manual_seed(0)
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    sums = []
    for step in range(3):
        model.zero_grad()
        ddp(torch.ones(2, FEATURES), step == rank).sum().backward()
        sums.append(-1.0 if model.second.bias.grad is None else model.second.bias.grad.sum().item())
    return sums


def test_unused_parameters(pair: TorchWorld) -> None:
    assert pair.run(leave_a_branch_unused) == [[5.0, 5.0, -1.0]] * SIZE


def keep_statistics(rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8))
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        ddp(torch.randn(4, FEATURES)).sum().backward()
    ddp(torch.randn(4, FEATURES))
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_starts_from_the_first_ranks_parameters(pair: TorchWorld) -> None:
    first, second = pair.run(keep_statistics)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def train_uneven(rank: int) -> tuple[int, Parameters]:
    """Rank 1 has twice as many batches."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    num_steps = 3 * (rank + 1)
    with Join([ddp]):
        for step in range(num_steps):
            x, y = batches(step)[rank]
            optimizer.zero_grad()
            F.mse_loss(ddp(x), y).backward()
            optimizer.step()
    return num_steps, parameters_of(model)


def test_join_with_uneven_inputs(pair: TorchWorld) -> None:
    (few, first), (many, second) = pair.run(train_uneven)
    assert (few, many) == (3, 6)
    torch.testing.assert_close(first, second)


def train_sharded(rank: int) -> tuple[bool, Parameters]:
    warnings.simplefilter("ignore")
    model = make_model()
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, lambda parts: parts[rank])
    shards = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    is_sharded = isinstance(model, FSDPModule) and all(
        shard.to_local().numel() < shard.numel() for shard in shards if shard.shape[0] >= SIZE
    )
    return is_sharded, [shard.full_tensor().detach().clone() for shard in shards]


def test_fsdp2_equals_one_process(pair: TorchWorld) -> None:
    results = pair.run(train_sharded)
    assert all(is_sharded for is_sharded, _ in results)
    assert_same([parameters for _, parameters in results], trained_alone())


def backward_until_killed(rank: int) -> tuple[str, float]:
    ddp = DistributedDataParallel(copy.deepcopy(make_model()), bucket_cap_mb=0.01)
    try:
        for step in range(10**6):
            x, y = batches(step)[rank]
            F.mse_loss(ddp(x), y).backward()
    except Exception as error:
        return str(error), time.time()
    return "", time.time()


def test_ddp_names_a_killed_rank(pair: TorchWorld) -> None:
    pair.start(backward_until_killed)
    time.sleep(2.0)
    killed_s = pair.kill(1)
    try:
        message, ended_s = pair.result(0)
        assert "rank 1 is lost" in message
        assert ended_s - killed_s < 30.0  # half of the group's timeout
    finally:
        pair.close()


SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("paceline")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.ones(4, 3) * (1 + dist.get_rank())).sum().backward()
# One write: two processes share the output.
sys.stdout.write(f"gradient {model.module.weight.grad[0, 0].item()} {dist.get_backend()}\\n")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["gradient 6.0 paceline"] * 2


LOADED = """
import sys, time, torch
from importlib.metadata import entry_points
print(*sorted(name for name in sys.modules if name.startswith(("paceline", "ray", "zmq"))))
print(hasattr(torch.distributed.Backend, "PACELINE"))
(own,) = [entry for entry in entry_points(group="torch.backends") if entry.name == "paceline"]
before_s = time.process_time()
own.load()()
print(time.process_time() - before_s < before_s / 40)
"""


@pytest.mark.parametrize(("switch", "loaded"), [("0", ""), ("1", "paceline paceline.torch_backend")])
def test_import_torch_registers_the_name_and_loads_nothing_else(switch: str, loaded: str) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": switch}
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=environment)
    assert done.stdout.splitlines() == [loaded, str(switch == "1"), "True"], (
        "the last: it takes at most a small part of what torch itself takes"
    )


def test_import_torch_outlives_a_torch_that_registers_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.Backend, "PACELINE")
    monkeypatch.setattr(dist.Backend, "register_backend", None)
    with pytest.warns(UserWarning, match="no backend 'paceline'"):
        torch_backend.autoload()
