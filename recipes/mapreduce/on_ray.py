"""Broadcast, map, reduce, update on Ray's tasks, with a clock around each."""

import sys
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import problem as _problem
import ray
from accounting import Observed, Parts, account, middle_half
from problem import Array, Problem, Rows, map_rows, reduce_sums, split, step, update

from paceline.errors import UsageError

NUM_WARM_UPS = 5
"""Iterations before the clock starts, once as many processes have come as there are tasks."""
COME_WITHIN_S = 30.0
"""After which it starts with those that there are."""
# A process of its own thread number from its start: in one that has loaded NumPy before, threads would fight for cores.
ONE_THREAD = {"env_vars": {"OMP_NUM_THREADS": "1"}}


def _map_task(rows: Rows, parameters: list[Any]) -> tuple[Array, float, float, str]:
    """The split's sum, the seconds to fetch the parameters and to compute, and which process it was."""
    began_s = time.perf_counter()
    w = ray.get(parameters[0])
    fetched_s = time.perf_counter()
    total = map_rows(rows, w)
    computed_s = time.perf_counter()
    return total, fetched_s - began_s, computed_s - fetched_s, ray.get_runtime_context().get_worker_id()


def _serial_task(problem: Problem, rate: float, num_steps: int) -> tuple[Array, list[float]]:
    step(problem, problem.start(), rate=rate)
    w, steps_s = problem.start(), []
    for _ in range(num_steps):
        began_s = time.perf_counter()
        w = step(problem, w, rate=rate)
        steps_s.append(time.perf_counter() - began_s)
    return w, steps_s


def require_room(problem: Problem) -> None:
    """Raises UsageError for rows that Ray's object store cannot hold twice, as descent in tasks and serial descent do;
    Ray would write them to the disk and read them again at every iteration."""
    rows_bytes, store_bytes = problem.x.nbytes + problem.y.nbytes, ray.cluster_resources()["object_store_memory"]
    if 2 * rows_bytes > store_bytes:
        raise UsageError(
            f"the rows take {rows_bytes / 1e6:.0f} MB, twice, and Ray's object store has {store_bytes / 1e6:.0f} MB: "
            "lower --rows or --features, or name a cluster with a larger one (--address)"
        )


def serial(problem: Problem, *, rate: float, num_steps: int) -> tuple[Array, float]:
    """Gradient descent in one process, and the seconds of a step. It is a task of Ray, and so has as many threads."""
    w, steps_s = ray.get(_task(_serial_task, num_cpus=1.0).remote(problem, rate, num_steps))
    return w, fmean(middle_half(steps_s, float))


def descend(problem: Problem, *, num_tasks: int, rate: float, num_steps: int) -> tuple[Array, list[Parts], int]:
    """Gradient descent with so many map tasks an iteration, which run at once, if need be on shares of a core.

    Returns:
        The parameters, the parts of each iteration, and the bytes that one moves.
    """
    share = min(1.0, ray.cluster_resources()["CPU"] / num_tasks)
    task = _task(_map_task, num_cpus=int(share * 1000) / 1000)  # rounded down, or they would not fit at once
    splits = [ray.put(rows) for rows in split(problem, num_tasks)]
    until_s = time.monotonic() + COME_WITHIN_S
    num_processes = 0
    while num_processes < num_tasks and time.monotonic() < until_s:
        _, _, num_processes = _iterate(task, splits, problem, problem.start(), rate)
    for _ in range(NUM_WARM_UPS):
        _iterate(task, splits, problem, problem.start(), rate)
    w = problem.start()
    seen = []
    for _ in range(num_steps):
        w, observed, _ = _iterate(task, splits, problem, w, rate)
        seen.append(observed)
    return w, [account(each) for each in seen], seen[0].moved_bytes


def _iterate(task: Any, splits: list[Any], problem: Problem, w: Array, rate: float) -> tuple[Array, Observed, int]:
    """The next parameters, what it took, and how many processes computed."""
    began_s = time.perf_counter()
    parameters = ray.put(w)
    broadcast_s = time.perf_counter()
    # In a list, Ray hands on the reference, and the task times how long the parameters take.
    results = [task.remote(rows, [parameters]) for rows in splits]
    arrived_s = _arrivals(results, since_s=broadcast_s)
    mapped_s = broadcast_s + max(arrived_s)
    sums, fetch_s, compute_s, processes = zip(*ray.get(results), strict=True)
    collected_s = time.perf_counter()
    w = update(w, reduce_sums(sums), num_rows=problem.num_rows, rate=rate)
    joined_s = time.perf_counter()
    observed = Observed(
        broadcast_s=broadcast_s - began_s,
        arrived_s=arrived_s,
        fetch_s=fetch_s,
        compute_s=compute_s,
        collect_s=collected_s - mapped_s,
        join_s=joined_s - collected_s,
        moved_bytes=2 * len(splits) * w.nbytes,
    )
    return w, observed, len({*processes})


def _arrivals(results: list[Any], *, since_s: float) -> list[float]:
    """When each result is there, wherever it lies: fetching it is timed by itself."""
    arrived_s = dict.fromkeys(results, 0.0)
    missing = results
    while missing:
        done, missing = ray.wait(missing, num_returns=1, fetch_local=False)
        now_s = time.perf_counter() - since_s
        arrived_s |= dict.fromkeys(done, now_s)
    return [arrived_s[result] for result in results]


def _task(function: Callable[..., Any], *, num_cpus: float) -> Any:
    return ray.remote(num_cpus=num_cpus, max_retries=0, runtime_env=ONE_THREAD)(function)


# The tasks' processes need not have these files: what they call travels with them.
for _name in (__name__, _problem.__name__):
    if _name != "__main__":
        ray.cloudpickle.register_pickle_by_value(sys.modules[_name])
