"""Workers of several hosts play clients. One of them dies, another one joins, and a whole host dies: each round is that
of a run in which nobody does."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from benchmarks.namespaces import Network
from tests.distributed.harness import pids, wait_until
from tests.distributed.test_elastic import of
from tests.distributed.test_elastic_federated import CLIENTS, GIVEN, JOINING, ROUNDS, require_undisturbed
from tests.distributed.test_elastic_hosts import (
    PATIENCE_S,
    end,
    go_on,
    host_of,
    pids_on,
    said,
    scale,
    start,
    three_hosts,
)
from tests.distributed.test_joining import held, iterations_of, joined

__all__ = ["three_hosts"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_each_round_of_clients_is_the_undisturbed_one(three_hosts: Network, tmp_path: Path) -> None:
    """Of four workers one is killed when it has contributed to a round, and another one comes; then the host with
    worker 2 dies."""
    network, strategy = three_hosts, f"scaffold:{CLIENTS}"
    address = network.start_ray()
    options = ["--strategy", strategy, "--max-steps", str(ROUNDS)]
    given = [*GIVEN, *held(1, 3), "--fail-at", f"3:2:{JOINING}.join"]
    process, out = start(
        network, address, tmp_path / "clients", *given, workers=4, samples=96, step_s=0.02, options=options
    )
    assert wait_until(lambda: iterations_of(out), within_s=PATIENCE_S), said(process)
    assert "4 workers train; 1 more start" in scale(network, out, 5)
    go_on(process, out, held_at=(1,))
    assert wait_until(lambda: joined(out) and of(out, "lost"), within_s=PATIENCE_S), said(process)
    struck = host_of(network, pids(out)["worker-2"])
    assert struck != network.hosts[0]
    for pid in pids_on(struck):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: "worker-2" in [event["who"] for event in of(out, "lost")], within_s=PATIENCE_S)
    (out.parent / "log" / "go-3").touch()
    end(process)
    lost = [event["who"] for event in of(out, "lost")]
    assert lost[0] == "worker-3"
    assert "worker-2" in lost
    assert joined(out) == [4]
    assert 0 in of(out, "reformed")[-1]["details"]["ranks"]
    require_undisturbed(out, strategy)
