"""The parameter server that Ray's documentation teaches: actors, and gradients through the object store.

Written afresh after the structure of Ray's parameter server example (Ray documentation, Ray Core examples,
"Parameter Server"). Run as `python -m benchmarks.peers.ray_parameter_server`.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import psutil
import ray
import torch
from torch import Tensor

from .workload import backward, cycle_batches, make_model, make_optimizer, print_measurement, share_cores

SHUTDOWN_GRACE_S = 10.0

Mode = Literal["sync", "async"]
Gradients = list[np.ndarray]
Weights = dict[str, Tensor]

# The driver looks at the clock once in so many updates, as the documented example looks at the accuracy; between two
# looks it only queues tasks, which spares Ray a round trip through the driver an update.
NUM_UPDATES_PER_LOOK = 10


class ParameterServer:
    """Owns the model; every call applies one update and answers with the new weights."""

    def __init__(self, model_name: str) -> None:
        self.model = make_model(model_name)
        self.optimizer = make_optimizer(self.model)

    def get_weights(self) -> Weights:
        return self.model.state_dict()

    def apply_gradients(self, *gradients: Gradients) -> Weights:
        """One update with the sum of the workers' gradients."""
        for parameter, parts in zip(self.model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = torch.from_numpy(np.stack(parts).sum(axis=0))
        self.optimizer.step()
        return self.get_weights()


class DataWorker:
    """Computes the gradients of its next batch at the weights it is given."""

    def __init__(self, model_name: str, rank: int, num_workers: int, batch_size: int) -> None:
        share_cores(num_workers)
        self.model = make_model(model_name)
        self.batches = cycle_batches(batch_size, seed=rank)

    def compute_gradients(self, weights: Weights) -> Gradients:
        self.model.load_state_dict(weights)
        self.model.zero_grad()
        backward(self.model, next(self.batches))
        return [p.grad.numpy() for p in self.model.parameters() if p.grad is not None]


def measure(
    *, model: str, num_workers: int, batch_size: int, seconds: float, warmup_seconds: float, mode: Mode = "sync"
) -> float:
    """Samples per second of all workers together, over at least `seconds` after the warm-up.

    `sync` waits for every worker's gradient in each update; `async` applies each gradient as it arrives.
    Starts a Ray of its own and ends it; no other may be running in this process.
    """
    with _own_ray(num_workers):
        server = ray.remote(ParameterServer).remote(model)
        workers = [ray.remote(DataWorker).remote(model, rank, num_workers, batch_size) for rank in range(num_workers)]
        updates = {"sync": _synchronous, "async": _asynchronous}[mode](server, workers)
        num_samples_per_update = batch_size * (num_workers if mode == "sync" else 1)
        _num_updates_per_s(updates, warmup_seconds)
        return num_samples_per_update * _num_updates_per_s(updates, seconds)


def _synchronous(server: Any, workers: list[Any]) -> Iterator[Any]:
    """Yields, for ever, a reference to the weights after the next update, made of one gradient of every worker."""
    weights = server.get_weights.remote()
    while True:
        gradients = [worker.compute_gradients.remote(weights) for worker in workers]
        weights = server.apply_gradients.remote(*gradients)
        yield weights


def _asynchronous(server: Any, workers: list[Any]) -> Iterator[Any]:
    """The same where an update is made of whichever gradient is ready first."""
    weights = server.get_weights.remote()
    under_way = {worker.compute_gradients.remote(weights): worker for worker in workers}
    while True:
        [gradients], _ = ray.wait(list(under_way))
        worker = under_way.pop(gradients)
        weights = server.apply_gradients.remote(gradients)
        under_way[worker.compute_gradients.remote(weights)] = worker
        yield weights


def _num_updates_per_s(updates: Iterator[Any], duration_s: float) -> float:
    start = now = time.perf_counter()
    num_updates = 0
    while now - start < duration_s:
        for _ in range(NUM_UPDATES_PER_LOOK):
            weights = next(updates)
        ray.get(weights)
        num_updates += NUM_UPDATES_PER_LOOK
        now = time.perf_counter()
    return num_updates / (now - start)


@contextmanager
def _own_ray(num_workers: int) -> Iterator[None]:
    """A Ray on this machine alone, whose processes and files are gone afterwards."""
    if ray.is_initialized():
        raise RuntimeError("Ray is already running in this process: call ray.shutdown() before measuring")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    children_before = set(psutil.Process().children(recursive=True))
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local",
                num_cpus=num_workers + 1,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Actors import this module under the name by which the driver knows it.
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
                _temp_dir=folder,
            )
            yield
        finally:
            started = set(psutil.Process().children(recursive=True)) - children_before
            ray.shutdown()
            _, stubborn = psutil.wait_procs(started, timeout=SHUTDOWN_GRACE_S)
            for process in stubborn:
                process.kill()
            psutil.wait_procs(stubborn, timeout=SHUTDOWN_GRACE_S)


if __name__ == "__main__":
    print_measurement(measure, description=__doc__, modes=get_args(Mode))
