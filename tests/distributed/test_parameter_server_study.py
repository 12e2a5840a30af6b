"""The published study's recipe: its reading of an update, and its commands, on images of noise in CIFAR-10's files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import paceline
from paceline import Study

RECIPE = Path(__file__).parents[2] / "recipes" / "ray_parameter_server"
NUM_IMAGES = 40  # of each of the six files
ROW_BYTES = 1 + 3 * 32 * 32


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with CIFAR-10's files, as PACELINE_DATA may name it."""
    folder = tmp_path_factory.mktemp("data") / "cifar-10-batches-bin"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        rows = torch.randint(256, (NUM_IMAGES, ROW_BYTES), dtype=torch.uint8, generator=generator)
        rows[:, 0] %= 10
        (folder / name).write_bytes(rows.numpy().tobytes())
    return folder.parent


def trained(noise: Path, out: Path, *, workers: int, strategy: str = "ps-bsp", **script: Any) -> dict[str, Tensor]:
    """The conv net's parameters after three updates."""
    arguments = ["--data", str(noise), "--eval-samples", "10"]
    for name, value in script.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    paceline.run(
        RECIPE / "train.py",
        strategy=strategy,
        workers=workers,
        arguments=arguments,
        engine="virtual",
        cluster="published",
        max_steps=3,
        device="cpu",
        out=out,
    )
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize(("reduction", "factor"), [("sum", 1.0), ("mean", 2.0)])
def test_an_update_is_the_sum_of_the_workers_gradients(
    reduction: str, factor: float, noise: Path, tmp_path: Path
) -> None:
    """Two batches of 8 are one of 16; if losses are means, the sum of two gradients is twice that of the whole."""
    two = trained(noise, tmp_path / "two", workers=2, batch_size=8, reduction=reduction, lr=0.001, momentum=0.5)
    one = trained(
        noise, tmp_path / "one", workers=1, batch_size=16, reduction=reduction, lr=0.001 * factor, momentum=0.5
    )
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


def test_an_asynchronous_update_is_one_workers_gradient(noise: Path, tmp_path: Path) -> None:
    """Steps so small that gradients stay what they are: half as far as with the sum of two."""
    runs = {"start": ("ps-asp", 0.0), "asynchronous": ("ps-asp", 1e-6), "synchronous": ("ps-bsp", 1e-6)}
    bias = {
        name: trained(noise, tmp_path / name, workers=2, strategy=strategy, batch_size=100, lr=lr)["4.bias"]
        for name, (strategy, lr) in runs.items()
    }
    distances = [(bias[name] - bias["start"]).norm() for name in ("asynchronous", "synchronous")]
    assert distances[1] / distances[0] == pytest.approx(2.0, rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("part", ["convnet", "resnet18-both"])
def test_one_command_runs_a_part(part: str, noise: Path, tmp_path: Path) -> None:
    """Another part's is a command of docs/experiment.md."""
    command = ["python", RECIPE / "study.py", part, "--scale", "tiny", "--engine", "virtual", "--seeds", "1"]
    command += ["--out", tmp_path / "out"]
    if part != "resnet18-both":
        command += ["--workers", "2"]
    command += ["--", "--momentum", "0.5"]
    environment = os.environ | {"PACELINE_DATA": str(noise)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    study = Study.open(tmp_path / "out")
    assert set(study.frames.trials["status"]) == {"finished"}
    assert study.spec.arguments[:2] == ("--model", part.removesuffix("-both"))
    assert study.spec.arguments[-2:] == ("--momentum", "0.5")
    assert (tmp_path / "out" / "report.html").exists()
