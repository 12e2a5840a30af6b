"""Ray's Data, Tune and Train, TensorFlow's names for strategies, and Accelerate, on hosts of a network of their own."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.namespaces import Network
from paceline.running.result import Result
from tests.distributed.harness import SCRIPTS

RECIPE = SCRIPTS.parents[2] / "recipes" / "mnist_mirrored.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("pyarrow", "accelerate")),
        reason="Ray Data or Accelerate is not installed (paceline[frameworks])",
    ),
]


def told(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob(f"{name}-?.json"))]


def test_workers_on_two_hosts_train_as_one_process(hosts: Network, tmp_path: Path) -> None:
    """Each host has one core, and Ray Data has the third one's."""
    address = hosts.start_ray()
    command = [str(hosts.programs / "python"), str(SCRIPTS / "on_hosts.py"), address, str(tmp_path)]
    hosts.run(hosts.hosts[0], command, timeout_s=600)
    (alone,) = told(tmp_path, "alone")
    for name in ("names", "data", "tune", "train"):
        found = told(tmp_path, name)
        assert len({each["host"] for each in found}) == len(found) == 2, name
        for each in found:
            torch.testing.assert_close(torch.tensor(each["weight"]), torch.tensor(alone["weight"]), atol=1e-5, rtol=0.0)
    out = tmp_path / "recipe"
    options = ["--workers", "2", "--dataset", "digits", "--epochs", "3", "--address", address, "--out", str(out)]
    hosts.run(hosts.hosts[0], [str(hosts.programs / "python"), str(RECIPE), *options], timeout_s=600)
    assert Result.open(out).metrics["accuracy"] > 0.85
    script = RECIPE.parents[1] / "examples" / "accelerate_text.py"  # which asks for the first worker's address
    options = [
        "--strategy",
        "all-reduce",
        "--workers",
        "2",
        "--address",
        address,
        "--out",
        str(tmp_path / "accelerate"),
    ]
    said = hosts.run(
        hosts.hosts[0],
        [str(hosts.programs / "paceline"), "run", str(script), *options, "--", "--epochs", "1"],
        timeout_s=600,
    )
    assert "all-reduce, 2 worker(s)" in said
