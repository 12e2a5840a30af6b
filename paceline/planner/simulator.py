"""A run without tensors: the engine's draws of computing times, and exchanges on queues. Checks the closed forms.

What is aggregated, so that 10,000 workers are no more than some arrays:
- ranks of an exchange advance together, a vector of times in each round; the 2 (n - 1) rounds of a ring are one sliding
  maximum, since a rank that comes late is felt by others in the order of their distance (max-plus algebra);
- a worker's gradient is one job for all servers, which have equal ranges and so equal queues (`server_simulator`); its
  pieces of 1 MiB are kept as the overlap of pushing, updating and pulling.
`engines/virtual/network.py` does each message on its own; tests compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paceline.cluster.description import Cluster
from paceline.errors import UsageError
from paceline.planner import algorithms
from paceline.planner import filling as buckets
from paceline.planner.demand import StepWork
from paceline.planner.draws import Draws
from paceline.planner.fabric import Floats
from paceline.planner.server_simulator import AsynchronousRun, SynchronousRun
from paceline.planner.setting import Ring, Setting
from paceline.strategies import build
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Strategy
from paceline.strategies.parameter_server import ParameterServer

_SETTLING = 0.2
"""The part of the steps after which the means begin: who begins at once with all others is not in a steady state."""


@dataclass(frozen=True)
class Simulation:
    """Means after the first steps."""

    step_s: float
    iteration_s: float
    samples_per_s: float


def simulate(
    cluster: Cluster,
    *,
    strategy: str | Strategy,
    workers: int,
    work: StepWork,
    options: Mapping[str, Any] | None = None,
    steps: int = 100,
    seed: int = 0,
) -> Simulation:
    """As `predict`, by simulating so many steps of every worker.

    Raises:
        UsageError: as `predict`, or there are fewer than two steps.
    """
    if steps < 2:
        raise UsageError(f"steps must be at least 2, not {steps}")
    chosen = build(strategy, options) if isinstance(strategy, str) else strategy
    chosen.check(num_workers=workers)
    setting = Setting.of(cluster, work, num_workers=workers, num_servers=chosen.traits.num_servers)
    draws = Draws(setting, seed=seed)
    if isinstance(chosen, ParameterServer):
        run = SynchronousRun if chosen.traits.is_synchronous else AsynchronousRun
        iterations_s = run(chosen, setting, draws).run(steps)
        counted = workers - chosen.backup_workers if chosen.traits.is_synchronous else 1
        iteration_s = _mean_s(iterations_s)
        step_s = iteration_s if chosen.traits.is_synchronous else iteration_s * workers
        return Simulation(step_s, iteration_s, counted * work.samples / iteration_s)
    ends_s = _lock_step(_exchange_of(chosen, setting), setting, draws, steps)
    step_s = _mean_s(ends_s)
    return Simulation(step_s, step_s, workers * work.samples / step_s)


def _mean_s(ends_s: Sequence[float]) -> float:
    """From one end to the next, after the first steps."""
    first = int(len(ends_s) * _SETTLING)
    return (ends_s[-1] - ends_s[first]) / (len(ends_s) - 1 - first)


# --- lock-step -------------------------------------------------------------------------------------------------------

_Exchange = Callable[[Floats, Floats], Floats]
"""When each worker's exchange is over, given when it begins to compute and for how long it does."""


def _lock_step(exchange: _Exchange, setting: Setting, draws: Draws, steps: int) -> list[float]:
    """When all workers have ended each step, on the average."""
    now_s = np.zeros(setting.num_workers)
    ends_s = []
    for _ in range(steps):
        now_s = exchange(now_s, draws.all_s()) + setting.work.overhead_s
        ends_s.append(float(now_s.mean()))
    return ends_s


def _exchange_of(strategy: Strategy, setting: Setting) -> _Exchange:
    if not isinstance(strategy, AllReduce) or setting.num_workers == 1:
        return lambda now_s, computing_s: now_s + computing_s
    sizes = buckets.of(strategy, setting)
    if strategy.algorithm != "auto":
        return partial(_one_after_another, strategy.algorithm, setting, [bucket.num_bytes for bucket in sizes])
    parts = buckets.ready_parts(sizes, setting)
    return partial(_behind_backward, setting, [bucket.num_bytes for bucket in sizes], parts)


def _behind_backward(
    setting: Setting, sizes_bytes: list[float], parts: list[float], now_s: Floats, computing_s: Floats
) -> Floats:
    """A ring for each bucket, from when it is full on every rank and the one before has left the links."""
    hosts = [np.array(ranks) for ranks in setting.places.ranks_by_host]
    ends_s = now_s
    free_s = 0.0
    for number, (num_bytes, part) in enumerate(zip(sizes_bytes, parts, strict=True), 1):
        ready_s = now_s + part * computing_s + number * setting.operation_s
        busy_s, _ = setting.ring.parts_s(num_bytes)
        begin_s = np.array([ready_s[ranks].max() for ranks in hosts]) if len(hosts) < len(ready_s) else ready_s
        begin_s = np.maximum(begin_s, free_s)
        free_s = float(begin_s.max()) + busy_s
        host_ends_s = ring_ends_s(setting.ring, begin_s, num_bytes)
        ends_s = np.empty_like(now_s)
        for ranks, end_s in zip(hosts, host_ends_s.tolist(), strict=True):
            ends_s[ranks] = end_s
    over_s: Floats = np.maximum(ends_s, now_s + computing_s + len(sizes_bytes) * setting.operation_s)
    return over_s


def ring_ends_s(ring: Ring, begin_s: Floats, num_bytes: float) -> Floats:
    """When each host is through a ring that they enter at these times.

    In each of R = 2 (n - 1) rounds a host waits for the one before it, so it ends at the maximum over d of when the
    host d places before began, plus d hops' latency, plus R times what a part takes through the slowest hop; of the d
    that lead to the same host, which differ by n, the largest counts.
    """
    size = len(begin_s)
    memory_s = 2 * float((ring.num_inner * num_bytes / ring.fabric.rates.memory[ring.leaders]).max())
    if size == 1:
        return begin_s + memory_s
    rounds = 2 * (size - 1)
    latencies_s = np.tile(ring.hop_latencies_s, 3)
    passed_s = np.concatenate([[0.0], np.cumsum(latencies_s)[:-1]])
    heads_s = np.tile(begin_s, 3) - passed_s
    places = np.arange(2 * size, 3 * size)
    latest_s = _largest_of_each(heads_s, size)[places - rounds] + passed_s[places]
    over_s: Floats = latest_s + rounds * num_bytes / (size * ring.hop_bytes_per_s) + memory_s
    return over_s


def _largest_of_each(values: Floats, width: int) -> Floats:
    """Of every `width` values one after another, the largest; by maxima of blocks from both ends."""
    blocks = values.reshape(-1, width)
    until = np.maximum.accumulate(blocks, axis=1).ravel()
    since = np.maximum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    count = len(values) - width + 1
    found: Floats = np.maximum(since[:count], until[width - 1 :])
    return found


def _one_after_another(
    algorithm: str, setting: Setting, sizes_bytes: list[float], now_s: Floats, computing_s: Floats
) -> Floats:
    """Buckets by an algorithm over send and receive, once backward has ended."""
    now_s = now_s + computing_s
    for num_bytes in sizes_bytes:
        if algorithm == "ring":
            now_s = ring_ends_s(setting.ring_of_ranks, now_s, num_bytes)
        elif algorithm == "halving-doubling":
            now_s = _halved(setting, now_s, num_bytes)
        elif algorithm == "reduce-broadcast":
            now_s = _through_one(setting, now_s, num_bytes)
        else:
            now_s = np.full_like(now_s, float(now_s.max()) + algorithms.time_s(algorithm, setting, num_bytes))
    return now_s


def _through_one(setting: Setting, now_s: Floats, num_bytes: float) -> Floats:
    """Everyone's tensor queues at rank 0, in the order in which they come; then all get the result."""
    hosts = np.array(setting.places.workers)
    num_others = len(hosts) - 1
    together = setting.fabric.shares_per_s(hosts[1:], np.full(num_others, hosts[0]))
    each_s = num_bytes / float(together.min()) / num_others
    begin_s = np.sort(now_s[1:])
    in_s = float(np.max(begin_s + each_s * np.arange(num_others, 0, -1)))
    rest_s = algorithms.time_s("reduce-broadcast", setting, num_bytes) - each_s * num_others
    return np.full_like(now_s, max(in_s, float(now_s.max())) + rest_s)


def _halved(setting: Setting, now_s: Floats, num_bytes: float) -> Floats:
    """Stage by stage: a rank goes on when its partner's part has come."""
    for senders, receivers, sent_s in setting.timed_halving(num_bytes):
        after_s = now_s.copy()
        after_s[receivers] = np.maximum(now_s[receivers], now_s[senders] + sent_s)
        now_s = after_s
    return now_s
