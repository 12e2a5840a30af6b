"""A host is cut off while nothing runs there. Ray lists it for a minute more; a run that begins meanwhile leaves it
out, says so, and trains on the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.namespaces import Network
from tests.distributed.test_elastic_hosts import PATIENCE_S, set_link, start, three_hosts

__all__ = ["three_hosts"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_run_leaves_a_silent_host_out(three_hosts: Network, tmp_path: Path) -> None:
    address = three_hosts.start_ray()
    silent = three_hosts.hosts[1]
    set_link(three_hosts, silent, "down")
    options = ("--strategy", "ps-bsp:servers=3")
    process, out = start(three_hosts, address, tmp_path, "--epochs", 2, workers=3, step_s=0.0, options=options)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output + errors
    assert f"the host at {silent.address} does not answer, and gets no process" in output + errors
    started = next(json.loads(line) for line in (out / "events.jsonl").open() if '"started"' in line)
    assert started["details"]["hosts"] == 2
    assert len(started["details"]["pids"]) == 6
