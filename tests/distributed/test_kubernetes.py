"""The command of a job of KubeRay, given to a Ray of this machine as the operator's submitter gives it."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from paceline.engines.ray.local_directory import RAYS_OWN, local_directory
from paceline.engines.ray.tokens import own_token
from tests import apart
from tests.distributed.harness import PACELINE, SCRIPTS
from tests.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(
        apart.python_of("ray-default") is None,
        reason="there is no ray[default], whose dashboard takes jobs: `python tests/apart.py ray-default`",
    ),
]
PYTHON = str(apart.python_of("ray-default"))
RAY = f"{shlex.quote(PYTHON)} -m ray.scripts.scripts"
ODD = ["$(RAY_JOB_ID) $$", 'it\'s \\ a\n"line"', "*", "--", "-x"]
SCRIPT = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset
worker = paceline.init()
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model, optimizer, loader = worker.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=8)
)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
if "fail" in sys.argv:
    raise ValueError("as it was asked to")
"""


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Of a Ray with a token, where jobs find `paceline`."""
    port = free_port()
    path = f"{Path(PACELINE).parent}{os.pathsep}{os.environ['PATH']}"
    pipe = subprocess.PIPE
    with (
        own_token(),
        local_directory() as directory,
        subprocess.Popen(
            [PYTHON, str(SCRIPTS / "takes_jobs.py"), str(port), os.path.join(directory, RAYS_OWN)],
            env={**os.environ, "PATH": path},
            stdin=pipe,
            stdout=pipe,
            text=True,
        ) as ray,
    ):
        assert ray.stdin is not None
        assert ray.stdout is not None
        assert "takes jobs\n" in iter(ray.stdout.readline, "")
        yield f"http://127.0.0.1:{port}"
        ray.stdin.close()
        assert ray.wait(timeout=100) == 0


def submit(dashboard: str, home: Path, *arguments: str) -> str:
    """What Ray and the run say until the job has ended."""
    path = home / "my train.py"
    path.write_text(SCRIPT)
    options = ["--image", "i", "--name", "train", "--workers", "2", "--strategy", "ps-bsp:servers=1"]
    command = [PACELINE, "kubernetes", str(path), "--script-in-image", *options, "--", *arguments]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    entrypoint = yaml.safe_load(text)["spec"]["entrypoint"].replace("$$", "$")  # as Kubernetes does
    entrypoint = entrypoint.replace("/paceline/results", str(home))
    job = secrets.token_hex(4)
    asked = f"{RAY} job submit --address {dashboard} --no-wait --submission-id {job} -- {entrypoint} ; "
    asked += f"{RAY} job logs --address {dashboard} --follow {job} ; {RAY} job status --address {dashboard} {job}"
    done = subprocess.run(["bash", "-c", "--", asked], capture_output=True, text=True, timeout=600, check=False)
    return done.stdout + done.stderr


def test_the_job_trains_on_the_hosts_with_its_arguments(dashboard: str, tmp_path: Path) -> None:
    said = submit(dashboard, tmp_path, *ODD)
    results = tmp_path / "train"
    assert (results / "model.safetensors").exists(), said
    assert json.loads((results / "manifest.json").read_text())["arguments"] == ODD
    assert len((results / "steps.csv").read_text().splitlines()) == 1 + 2 * 4
    assert "succeeded" in said


def test_a_run_that_fails_is_a_job_that_fails(dashboard: str, tmp_path: Path) -> None:
    said = submit(dashboard, tmp_path, "fail")
    assert "as it was asked to" in said
    assert "succeeded" not in said
    assert "failed" in said
