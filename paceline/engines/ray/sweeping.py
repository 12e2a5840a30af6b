"""Ends what a run's scripts have started and left running."""

import contextlib
from collections.abc import Collection
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.engines.ray.liveness import end_processes_of

_SWEEP_S = 3.0  # how long other hosts may take


def sweep(run: str, node_ids: Collection[str]) -> None:
    """Remove what is left of the run on this host, and on these nodes."""
    end_processes_of(run)
    task = cast(Any, ray.remote)(num_cpus=0, max_retries=0)(end_processes_of)
    sweeps = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(run)
        for node_id in node_ids
    ]
    if sweeps:
        with contextlib.suppress(RayError):
            ray.wait(sweeps, num_returns=len(sweeps), timeout=_SWEEP_S)
