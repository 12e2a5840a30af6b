"""Frameworks that train over torch.distributed take the backend by its name, and train as they do over gloo."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.harness import Command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

LIGHTNING = """
import sys, torch, lightning.pytorch as pl, torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

torch.manual_seed(0)
x = torch.randn(64, 4)
model = Line()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=sys.argv[1]), max_epochs=3,
    enable_progress_bar=False, logger=False, default_root_dir=sys.argv[2],
)
trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
if trainer.global_rank == 0:
    print("trained over", dist.get_backend(), model.layer.weight.flatten().tolist())
"""

ACCELERATE = """
import sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])  # before the Accelerator, which would take gloo on CPUs
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
ranks = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
weight = accelerator.unwrap_model(model).weight.flatten().tolist()
if accelerator.is_main_process:
    sys.stdout.write(f"trained over {dist.get_backend()} {weight}\\n")
assert ranks == [0, 1]
# Nothing keeps the group beyond its end: gloo's threads would meet an interpreter that ends, and abort.
accelerator.free_memory()
del model, optimizer, loader
dist.destroy_process_group()
"""

TRANSFORMERS = """
import sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])  # before the TrainingArguments, which would take gloo on CPUs
from transformers import Trainer, TrainingArguments


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        predicted = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}


torch.manual_seed(0)
x = torch.randn(64, 4)
settings = {"num_train_epochs": 3, "per_device_train_batch_size": 8, "save_strategy": "no", "report_to": []}
trainer = Trainer(
    model=Line(),
    args=TrainingArguments(sys.argv[2], use_cpu=True, disable_tqdm=True, learning_rate=0.05, **settings),
    train_dataset=[{"x": row, "labels": row.sum().reshape(1)} for row in x],
)
trainer.train()
if dist.get_rank() == 0:
    sys.stdout.write(f"trained over {dist.get_backend()} {trainer.model.layer.weight.flatten().tolist()}\\n")
assert trainer.state.global_step == 3 * 64 // 8 // 2
# As above: nothing keeps the group beyond its end.
trainer.accelerator.free_memory()
del trainer
dist.destroy_process_group()
"""

RAY_TRAIN = """
import json, sys, ray, torch, torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train(config):
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    loader = prepare_data_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        weight = model.module.weight.tolist()
        with open(config["to"], "w") as file:
            json.dump([dist.get_backend(), dist.get_world_size(), type(model).__name__, weight], file)


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
for backend in ("gloo", "paceline"):
    trainer = TorchTrainer(
        train,
        train_loop_config={"to": f"{sys.argv[1]}/{backend}.json"},
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=backend, storage_path=sys.argv[1]),
    )
    trainer.fit()
"""


def trained(command: list[str], directory: Path) -> dict[str, str]:
    """What the script says that it has trained, by backend."""
    found = {}
    for backend in ("gloo", "paceline"):
        done = subprocess.run(
            [*command, backend, str(directory / backend)], capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("trained over ")]
        used, weight = line.removeprefix("trained over ").split(" ", 1)
        assert used == backend
        found[backend] = weight
    return found


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed (paceline[frameworks])")
def test_lightning(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LIGHTNING)
    found = trained(["python", str(script)], tmp_path)
    assert found["paceline"] == found["gloo"]


@pytest.mark.parametrize(("package", "text"), [("accelerate", ACCELERATE), ("transformers", TRANSFORMERS)])
def test_what_takes_gloo_on_cpus(package: str, text: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (paceline[frameworks])")
    script = tmp_path / "script.py"
    script.write_text(text)
    torchrun = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = trained([*torchrun, str(script)], tmp_path)
    assert found["paceline"] == found["gloo"]


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="Ray Train is not installed (paceline[ray-data])")
def test_ray_train(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RAY_TRAIN)
    command = Command(["python", str(script), str(tmp_path)], tmp_path, {"RAY_ADDRESS": "local"})
    try:
        output = command.wait()
        assert command.status == 0, output
        command.assert_nothing_left()
    finally:
        command.close()
    (gloo, *from_gloo), (own, *from_own) = (
        json.loads((tmp_path / f"{backend}.json").read_text()) for backend in ("gloo", "paceline")
    )
    assert (gloo, own) == ("gloo", "paceline")
    assert from_gloo[:2] == [2, "DistributedDataParallel"]
    assert from_own == from_gloo
