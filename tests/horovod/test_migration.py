"""A script of Horovod's becomes one of Paceline's, which trains the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import UsageError
from paceline.horovod.migration import migrate

LEGACY = """\
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# Horovod: start.
hvd.init()
torch.manual_seed(1)
if torch.cuda.is_available():
    # Horovod: one GPU a process.
    torch.cuda.set_device(hvd.local_rank())
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
# Horovod: divide the data.
sampler = DistributedSampler(
    data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(data, batch_size=8, sampler=sampler)
held_out = DataLoader(data, batch_size=64)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)

# Horovod: begin alike.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Average)


def train(epoch):
    sampler.set_epoch(epoch)
    for inputs, wanted in loader:
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            # "é" takes two bytes
            optimizer.step()
    print("é", hvd.rank(), "of", hvd.size(), len(sampler))


for epoch in range(2):
    train(epoch)
total = hvd.allreduce(model.weight.detach().sum(), name="total", op=hvd.Sum)
if hvd.rank() == 0:
    print("weights", [round(each, 4) for each in model.weight.flatten().tolist()], round(float(total), 4))
"""

MIGRATED = """\
import torch
import paceline
from torch.utils.data import DataLoader, TensorDataset

# Horovod: start.
worker = paceline.init()
torch.manual_seed(1)
if torch.cuda.is_available():
    # Horovod: one GPU a process.
    pass
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=8, shuffle=False)
held_out = DataLoader(data, batch_size=64)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * worker.size, momentum=0.9)

model, optimizer, loader = worker.prepare(model, optimizer, loader)


def train(epoch):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print("é", worker.rank, "of", worker.size, (len(data) // worker.size))


for epoch in range(2):
    train(epoch)
total = worker.all_reduce(model.weight.detach().sum(), op="sum")
if worker.rank == 0:
    print("weights", [round(each, 4) for each in model.weight.flatten().tolist()], round(float(total), 4))
"""


def test_three_lines_take_the_place_of_horovod_s() -> None:
    found = migrate(LEGACY)
    # A comment at the head of an unwrapped block goes with the block's line.
    assert found.source == MIGRATED
    assert [note.line for note in found.notes] == [0, 0, 11]
    assert "worker.all_reduce in the training loop takes lock step" in found.notes[1].text


def test_the_command_prints_the_diff_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "legacy.py"
    script.write_text(LEGACY)
    monkeypatch.setattr(sys, "argv", ["paceline", "migrate", str(script)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert "-hvd.init()\n+worker = paceline.init()\n" in said.out
    assert "add @worker.evaluation" in said.err
    assert script.read_text() == LEGACY
    subprocess.run(["patch", "-s", str(script)], input=said.out, text=True, check=True)
    assert script.read_text() == MIGRATED


def test_what_is_left_keeps_its_import_and_is_told() -> None:
    source = LEGACY + "hvd.barrier()\nratio = hvd.allreduce(total, prescale_factor=2.0)\n"
    source = source.replace("op=hvd.Average)", "compression=hvd.Compression.fp16, backward_passes_per_step=2)")
    found = migrate(source)
    assert "import horovod.torch as hvd\nimport paceline\n" in found.source
    said = "\n".join(note.text for note in found.notes)
    for part in (
        "hvd.barrier is left",
        "hvd.allreduce is left",
        "compression is gone: give the run --option codec=fp16",
        "backward_passes_per_step is gone: put all passes but the last in `with worker.no_sync():`",
    ):
        assert part in said


def test_an_optimizer_in_an_optimizer_and_a_loader_that_comes_later() -> None:
    found = migrate(
        "import os, horovod.torch as hvd\n"
        "hvd.init()\n"
        "opt = hvd.DistributedOptimizer(SGD(net.parameters(), lr=1), named_parameters=net.named_parameters())\n"
        "train_data = DataLoader(data, shuffle=True)\n"
        "test_data = DataLoader(data)\n"
    )
    assert found.source == (
        "import os\nimport paceline\n"
        "worker = paceline.init()\n"
        "opt = SGD(net.parameters(), lr=1)\n"
        "train_data = DataLoader(data, shuffle=True)\n"
        "net, opt, train_data = worker.prepare(net, opt, train_data)\n"
        "test_data = DataLoader(data)\n"
    )


def test_a_loader_between_the_optimizer_and_what_is_removed() -> None:
    found = migrate(
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        "opt = hvd.DistributedOptimizer(opt, named_parameters=net.named_parameters())\n"
        "train_data = DataLoader(data, shuffle=True)\n"
        "hvd.broadcast_parameters(net.state_dict(), root_rank=0)\n"
        "if hvd.size() > 1:\n"
        "    hvd.broadcast_parameters(net.state_dict(), root_rank=0)\n"
        "    hvd.broadcast_optimizer_state(opt, root_rank=0)\n"
    )
    assert found.source == (
        "import paceline\n"
        "worker = paceline.init()\n"
        "train_data = DataLoader(data, shuffle=True)\n"
        "net, opt, train_data = worker.prepare(net, opt, train_data)\n"
        "if worker.size > 1:\n"
        "    pass\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import tqdm\nfrom torch.utils.data.distributed import DistributedSampler\n", "import tqdm\n"),
        ("from data import DistributedSampler, load\nload()\n", "from data import load\nload()\n"),
        ("import os; from data import DistributedSampler\n", "import os; pass\n"),
        ("from data import DistributedSampler\nhint: 'DistributedSampler'\n", None),
        ("from data import DistributedSampler\nother = None  # type: list[DistributedSampler]\n", None),
        ("from data import (  # noqa: F401\n    DistributedSampler,\n    load,\n)\nload()\n", None),
        ("# Without Horovod, for tests.\nfrom data import DistributedSampler\n", "# Without Horovod, for tests.\n"),
        ("from data import DistributedSampler\nother = DistributedSampler(rest, shuffle=False)\n", None),
    ],
)
def test_imports_of_what_is_gone_go(before: str, after: str | None) -> None:
    found = migrate(
        f"{before}import horovod.torch as hvd\n"
        "sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())\n"
        "train_data = DataLoader(data, sampler=sampler)\n"
        "opt = hvd.DistributedOptimizer(opt, named_parameters=net.named_parameters())\n"
    )
    assert found.source.partition("import paceline\n")[0] == (before if after is None else after)


@pytest.mark.parametrize(
    ("also", "is_kept"),
    [("torch.of(data)", True), ("torch.utils.rnn.of(data)", True), ("'torch.utils.data.x'", True), ("data", False)],
)
def test_an_import_by_its_whole_path_stays_while_its_package_is_in_use(also: str, is_kept: bool) -> None:
    """It may have loaded what else of the package is used."""
    found = migrate(
        "import torch.utils.data.distributed\nimport horovod.torch as hvd\n"
        "sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size())\n"
        f"train_data = DataLoader({also}, sampler=sampler)\n"
        "opt = hvd.DistributedOptimizer(opt, named_parameters=net.named_parameters())\n"
    )
    start = "import torch.utils.data.distributed\n" if is_kept else ""
    assert found.source.startswith(f"{start}import paceline\n")


def test_arguments_by_name() -> None:
    found = migrate(
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        "sampler = DistributedSampler(dataset=data, num_replicas=hvd.size(), rank=hvd.rank())\n"
        "train_data = DataLoader(data, sampler=sampler)\n"
        "opt = hvd.DistributedOptimizer(optimizer=opt, named_parameters=net.named_parameters())\n"
        "print(len(sampler))\n"
    )
    assert "print((len(data) // worker.size))" in found.source


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch\n", "does not import horovod.torch by a name"),
        ("import horovod.torch as hvd\nhvd.init(\n", "not valid Python"),
        ("import horovod.torch as hvd\nhvd.init()\n", "no optimizer = hvd.DistributedOptimizer"),
        (
            "import horovod.torch as hvd\nopt = hvd.DistributedOptimizer(**given)\n"
            "hvd.broadcast_parameters(net.state_dict())\ntrain = DataLoader(data)\n",
            "line 2: which optimizer hvd.DistributedOptimizer gets cannot be told; write it as optimizer=",
        ),
        ("import horovod.torch as hvd\nopt = hvd.DistributedOptimizer(opt)\n", "the model cannot be told"),
        (
            "import horovod.torch as hvd\nopt = hvd.DistributedOptimizer(opt, net.named_parameters())\n"
            "one = DataLoader(a)\nother = DataLoader(b)\n",
            "which DataLoader trains cannot be told: there are 2",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(source: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        migrate(source)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_both_train_the_same(tmp_path: Path) -> None:
    """With samples in order, a global batch has the same samples in both."""
    (tmp_path / "legacy.py").write_text(LEGACY.replace("horovod.torch", "paceline.horovod.torch"))
    (tmp_path / "migrated.py").write_text(MIGRATED)
    weights = []
    for name in ("legacy.py", "migrated.py"):
        command = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("weights"))
        weights.append(line)
    assert weights[0] == weights[1]
