"""The ways to start: plain Python, torchrun, `paceline.run` in a process with and without a Ray of its own."""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path

import pytest

from tests.distributed.harness import SCRIPTS

DEMO_SCRIPT = resources.files("paceline").joinpath("demo_script.py")


def accuracies(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"^paceline: accuracy ([\d.]+)$", output, re.MULTILINE)]


def test_plain_python(start) -> None:
    command = start(DEMO_SCRIPT, "--epochs", 3, program=sys.executable)
    output = command.wait()
    assert command.status == 0
    assert len(accuracies(output)) == 1
    assert accuracies(output)[0] > 0.9
    assert len(output.splitlines()) == 1, output
    command.assert_nothing_left()


def test_plain_python_script_that_fails(start, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import paceline\nworker = paceline.init()\nraise ValueError('broken on purpose')\n")
    command = start(program=str(script))
    assert command.wait().rstrip().endswith("ValueError: broken on purpose")
    assert command.status == 1
    command.assert_nothing_left()


def test_torchrun(start, tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    arguments = ("--standalone", "--nproc-per-node", 2, SCRIPTS / "same_everywhere.py", tmp_path)
    command = start(*arguments, program=torchrun)
    output = command.wait()
    assert command.status == 0, output
    digests = [(tmp_path / f"digest-{rank}").read_text() for rank in range(2)]
    assert digests[0] == digests[1]
    assert "Warning" not in output
    command.assert_nothing_left()


@pytest.mark.slow
def test_torchrun_with_the_demo_script(start) -> None:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = start("--standalone", "--nproc-per-node", 2, DEMO_SCRIPT, "--epochs", 3, program=torchrun)
    output = command.wait()
    assert command.status == 0, output
    assert len(accuracies(output)) == 1
    assert accuracies(output)[0] > 0.85
    assert "Warning" not in output
    command.assert_nothing_left()


@pytest.mark.ray
@pytest.mark.slow
def test_run_twice_from_python_and_within_a_ray_of_ones_own(start, tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    command = start(program=str(script))
    output = command.wait()
    assert command.status == 0, output
    said = [line for line in output.splitlines() if line.startswith("result ")]
    assert said == [
        "result of its own: 6 steps, offset 10",
        "result not connected",
        "result within: 6 steps, offset 30",
        "result still connected: 42",
    ]
    assert "[worker-1] rank 1 of 2" in output
    command.assert_nothing_left()


NOTEBOOK = """
import ray
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

class Net(torch.nn.Module):  # of __main__, as in a notebook
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)

offset = 0

def train():
    worker = paceline.init()
    print(f"rank {worker.rank} of {worker.size}")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(24, 3)), batch_size=2)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    worker.evaluation(lambda model: {"offset": offset})
    for (x,) in loader:
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def go(where, number):
    global offset
    offset = number
    result = paceline.run(train, strategy=paceline.ParameterServer(), workers=2)
    print(f"result {where}: {result.iteration} steps, offset {result.metrics['offset']:.0f}")

@ray.remote
def answer():
    return 42

if __name__ == "__main__":
    go("of its own", 10)
    if not ray.is_initialized():
        print("result not connected")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    go("within", 30)
    print("result still connected:", ray.get(answer.remote()))
    ray.shutdown()
"""
