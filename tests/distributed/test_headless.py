"""A Ray cluster as KubeRay makes it: a head without cores, which starts the run, and hosts that come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from paceline.cli import exit_codes
from paceline.engines.ray.tokens import own_token
from tests.distributed.harness import Command, events, wait_until
from tests.distributed.small_script import lines_by_rank, write_script

NODE = {"object_store_memory": 80_000_000}


def memberships(results: Path) -> list[list[int]]:
    """Who has joined at each."""
    return [event["details"]["joined"] for event in events(results) if event["name"] == "reformed"]


@pytest.mark.slow
@pytest.mark.ray
def test_an_elastic_run_outlives_a_host_and_has_a_worker_start_on_the_next(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    """Its workers, the one that joins too, have the variables that the command names, and this Ray does not."""
    script, results = tmp_path / write_script(tmp_path, epochs=2000, pause_s=0.1), tmp_path / "results"
    tells = "import os; print('variables', os.environ['COLOUR'], os.environ['SIZE'])\n"
    script.write_text(tells + script.read_text())
    with own_token():
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        try:
            _, second = [cluster.add_node(num_cpus=1, **NODE) for _ in range(2)]
            cluster.wait_for_nodes()
            options = ["--workers", "2", "--elastic", "1:2", "--replace", "1", "--out", results]
            named = ["--env", "COLOUR", "--env", "SIZE=a=7"]
            run = start("run", script, "--address", cluster.address, *options, *named, COLOUR="blue")
            steps = results / "steps.csv"
            assert wait_until(lambda: sum(n >= 5 for n in lines_by_rank(steps).values()) == 2)
            cluster.remove_node(second, allow_graceful=False)
            cluster.add_node(num_cpus=1, **NODE)
            assert wait_until(lambda: memberships(results) == [[], [2]]), events(results)
            start("stop", results).wait()
            said = run.wait()
        finally:
            cluster.shutdown()
    assert run.status == exit_codes.INTERRUPTED, said
    assert said.count("variables blue a=7") == 3, said
    assert [event["who"] for event in events(results) if event["name"] == "lost"] in (["worker-0"], ["worker-1"])
    assert (results / "checkpoint.pt").exists()
