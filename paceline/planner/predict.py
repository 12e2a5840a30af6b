"""One strategy on so many workers of a cluster: what a step takes, and what it takes it for. Closed forms only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.cluster.description import Cluster
from paceline.errors import UsageError
from paceline.planner import algorithms, costs, stragglers
from paceline.planner import filling as buckets
from paceline.planner.demand import StepWork
from paceline.planner.fabric import Busiest, Loads
from paceline.planner.servers import ServerExchange, server_exchange
from paceline.planner.setting import Setting
from paceline.strategies import build, name_of
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Strategy
from paceline.strategies.parameter_server import DEFAULT_STALENESS, ParameterServer
from paceline.strategies.single import Single

_NUM_DRAWS = 4096
"""Computing times that are drawn for one prediction, of all workers together."""
_FULL = 0.95
"""Of the time: a link that is so busy lets no further worker do more, however short each one's exchange is."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a strategy would do. Times are means, in seconds.

    `compute_s`, `waiting_s`, `exchange_s` and `overhead_s` add up to `step_s`.
    """

    strategy: str
    workers: int
    servers: int
    step_s: float
    """Between two steps of a worker."""
    iteration_s: float
    """Between two updates, as the literature counts them: of all workers together, or of one gradient."""
    samples_per_s: float
    """Of all workers together; of those whose gradients count, with backup workers."""
    efficiency: float
    """`samples_per_s` over as many times that of one worker alone."""
    compute_s: float
    """A worker's forward and backward pass."""
    waiting_s: float
    """For slower workers."""
    exchange_s: float
    """For gradients and parameters to move, what backward hides left out, and for the servers' updates."""
    hidden_s: float
    """What of the exchange backward hides."""
    overhead_s: float
    busiest: Busiest
    """What an exchange of all workers, a step each, keeps busy longest."""
    resource: str
    """What kind of thing that is: a server's card, a worker's card, a rack's cable, the core, the servers' own work."""
    link_bytes: Mapping[str, float] = field(default_factory=dict)
    """In a step of all workers, through the most loaded link of each kind, the fuller direction."""
    step_s_low: float = 0.0
    step_s_high: float = 0.0
    """Bounds, where that is all that is known; else `step_s`. Of ssp: no faster than asp, no slower than bsp. Of both
    with constant computing times: workers that begin together may stay together, or not."""

    @property
    def utilisation(self) -> float:
        """The part of the time for which the busiest link or memory is busy."""
        return min(1.0, self.busiest.busy_s / self.step_s)

    @property
    def binding(self) -> str:
        """What is busy all the time; else what most of a step goes to."""
        if self.utilisation >= _FULL:
            return self.resource
        if self.compute_s >= max(self.exchange_s, self.waiting_s):
            return "computing"
        return "slower workers" if self.waiting_s >= self.exchange_s else self.bottleneck

    @property
    def bottleneck(self) -> str:
        """Of the exchange."""
        return self.resource if self.busiest.busy_s > (self.exchange_s + self.hidden_s) / 2 else "latency"

    @property
    def global_batch(self) -> float:
        """Samples an update is the mean of."""
        return self.samples_per_s * self.iteration_s


def predict(
    cluster: Cluster,
    *,
    strategy: str | Strategy,
    workers: int,
    work: StepWork,
    options: Mapping[str, Any] | None = None,
) -> Prediction:
    """What a step of `work` takes under a strategy.

    Args:
        strategy: a name of `paceline strategies`, or a strategy such as `ParameterServer(servers=2)`.
        options: of the strategy, where it is given by name.

    Raises:
        UsageError: there is no such strategy, the cluster has no room, or nothing says how long a step computes.
    """
    chosen = build(strategy, options) if isinstance(strategy, str) else strategy
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    chosen.check(num_workers=workers)
    setting = Setting.of(cluster, work, num_workers=workers, num_servers=chosen.traits.num_servers)
    if isinstance(chosen, ParameterServer):
        return _of_servers(chosen, setting)
    if isinstance(chosen, AllReduce):
        return _of_all_reduce(chosen, setting)
    if isinstance(chosen, Single):
        return _summed_up(chosen, setting, slowest_s=setting.mean_s, end_s=setting.mean_s, loads=setting.fabric.nothing)
    raise UsageError(f"nobody has written down what {type(chosen).__name__} costs; run it on the virtual engine")


# --- all-reduce ------------------------------------------------------------------------------------------------------


def _of_all_reduce(strategy: AllReduce, setting: Setting) -> Prediction:
    slowest_s = stragglers.expected_s(setting.groups)
    sizes = buckets.of(strategy, setting)
    if setting.num_workers == 1:
        return _summed_up(strategy, setting, slowest_s=slowest_s, end_s=slowest_s, loads=setting.fabric.nothing)
    if strategy.algorithm == "auto":
        # Starting an exchange holds up backward.
        computed_s = slowest_s + len(sizes) * setting.operation_s
        ready_s = [
            slowest_s * part + number * setting.operation_s
            for number, part in enumerate(buckets.ready_parts(sizes, setting), 1)
        ]
        parts = [setting.ring.parts_s(bucket.num_bytes) for bucket in sizes]
        ends_s = costs.queue_ends_s(ready_s, [busy_s for busy_s, _ in parts])
        end_s = max(computed_s, max(end + rest for end, (_, rest) in zip(ends_s, parts, strict=True)))
        alone_s = sum(busy_s for busy_s, _ in parts) + parts[-1][1]
        loads = setting.ring.loads(sum(bucket.num_bytes for bucket in sizes))
    else:
        alone_s = sum(algorithms.time_s(strategy.algorithm, setting, bucket.num_bytes) for bucket in sizes)
        end_s = slowest_s + alone_s
        loads = algorithms.loads(strategy.algorithm, setting, sum(bucket.num_bytes for bucket in sizes))
    hidden_s = max(0.0, alone_s - (end_s - slowest_s))
    return _summed_up(strategy, setting, slowest_s=slowest_s, end_s=end_s, loads=loads, hidden_s=hidden_s)


# --- parameter servers -----------------------------------------------------------------------------------------------


def _of_servers(strategy: ParameterServer, setting: Setting) -> Prediction:
    if strategy.consistency == "bsp":
        return _of_synchronous_servers(strategy, setting)
    exchange = server_exchange(setting, num_gradients=1)
    free_s = _asynchronous_step_s(setting, exchange)
    mean_s, slowest_s = setting.mean_s, stragglers.expected_s(setting.groups)
    # Who begins together and is never told apart by computing stays together, and waits for links with all others.
    together_s = mean_s + exchange.ask_s + exchange.push_s + exchange.after_push_s + float(exchange.latency_s.max())
    computing_s, end_s = mean_s, free_s
    bounds_s = free_s, max(free_s, together_s) if setting.is_constant else free_s
    if strategy.consistency == "ssp":
        staleness = DEFAULT_STALENESS if strategy.staleness is None else strategy.staleness
        computing_s = max(mean_s, _window_s(setting, slowest_s, staleness))
        # Where links are full, who waits for others gives them the links: no step is shorter than what those need.
        full_s = setting.num_workers * max(exchange.hub_s, exchange.served_s)
        end_s = max(free_s, full_s, computing_s + exchange.ask_s + float(exchange.trips_s.mean()))
        computing_s = min(computing_s, end_s)
        bounds_s = free_s, max(end_s, slowest_s + free_s - mean_s, bounds_s[1])
    return _summed_up(
        strategy,
        setting,
        slowest_s=computing_s,
        end_s=end_s,
        loads=exchange.loads,
        served_s=exchange.served_s * setting.num_workers,
        bounds_s=bounds_s,
    )


def _asynchronous_step_s(setting: Setting, exchange: ServerExchange) -> float:
    """Of a worker, on the average of all."""
    num_workers, overhead_s = setting.num_workers, setting.work.overhead_s
    own_s = float(exchange.own_both_s.mean())
    besides_s = exchange.ask_s + float(exchange.trips_s.mean()) - own_s + overhead_s
    cycle_s = num_workers / sum(group.count / (group.times.expected_s + besides_s) for group in setting.groups)
    rate = costs.asynchronous_rate(num_workers, cycle_s=cycle_s, own_s=own_s, shared_s=exchange.hub_s)
    return max(num_workers / rate, num_workers * exchange.served_s) - overhead_s


def _window_s(setting: Setting, slowest_s: float, staleness: int) -> float:
    """A clock's mean computing time where nobody is more than s clocks ahead, an estimate between the bounds.

    With w, what a barrier at every clock would cost in parts of a step: w / (s + 1), as if there were one at every
    s + 1 clocks, or w**2 / (2 s + 1) where that is less: the difference of two workers is a random walk held within
    2 s + 1 steps, whose pushes back are in proportion to its variance. Within a tenth of a step of the simulator
    for log-normal times, and above it for exponential ones. A host that is always slower is not made up for.
    """
    mean_s = max(group.times.expected_s for group in setting.groups)
    wait = max(0.0, slowest_s / mean_s - 1)
    part = min(wait / (staleness + 1), wait**2 / (2 * staleness + 1)) if staleness else wait
    return mean_s * (1 + part)


def _of_synchronous_servers(strategy: ParameterServer, setting: Setting) -> Prediction:
    counted = setting.num_workers - strategy.backup_workers
    exchange = server_exchange(setting, num_gradients=counted)
    slowest_s = stragglers.expected_s(setting.groups, left_out=strategy.backup_workers)
    end_s = slowest_s + exchange.ask_s + _after_slowest_s(setting, exchange, counted)
    end_s += float(exchange.latency_s.max())
    return _summed_up(
        strategy,
        setting,
        slowest_s=slowest_s,
        end_s=end_s,
        loads=exchange.loads,
        served_s=exchange.update_s + setting.num_workers * exchange.request_s,
        counted=counted,
    )


def _after_slowest_s(setting: Setting, exchange: ServerExchange, counted: int) -> float:
    """From when the last worker that counts has computed until all are answered: the mean over some typical draws.

    Who is answered first computes first, and so is less in the others' way when it pushes.
    """
    num_workers = setting.num_workers
    num_draws = 1 if setting.is_constant else max(1, _NUM_DRAWS // num_workers)
    chances = np.random.default_rng(0).random((num_draws, num_workers))  # the same draws whatever is compared
    computing_s = np.empty_like(chances)
    for number, group in enumerate(setting.groups):
        ranks = setting.ranks_of(number)
        computing_s[:, ranks] = group.times.at(chances[:, ranks])
    ahead_s = exchange.turn_s * np.arange(num_workers - 1, -1, -1)
    starts_s = np.sort(computing_s - ahead_s, axis=1)[:, :counted]
    last_s = np.sort(computing_s, axis=1)[:, counted - 1]
    return float(np.mean(exchange.answered_s(starts_s) - last_s))


# --- in the end ------------------------------------------------------------------------------------------------------


def _summed_up(
    strategy: Strategy,
    setting: Setting,
    *,
    slowest_s: float,
    end_s: float,
    loads: Loads,
    hidden_s: float = 0.0,
    served_s: float = 0.0,
    counted: int | None = None,
    bounds_s: tuple[float, float] | None = None,
) -> Prediction:
    """
    Args:
        slowest_s: of the workers that are waited for, their computing.
        end_s: of a step, without what comes besides computing and exchange.
        served_s: for which a server is busy with requests and updates in a step of all workers.
        counted: workers whose gradients count.
    """
    work, fabric = setting.work, setting.fabric
    step_s = end_s + work.overhead_s
    mean_s = min(setting.mean_s, slowest_s)
    counted = counted or setting.num_workers
    samples_per_s = counted * work.samples / step_s
    busiest = fabric.busiest(loads)
    resource = setting.kind_of(busiest)
    if served_s > busiest.busy_s:
        resource = "the servers' own work"
        busiest = Busiest(resource, setting.work.parameter_bytes, served_s)
    low_s, high_s = bounds_s or (end_s, end_s)
    return Prediction(
        strategy=name_of(strategy),
        workers=setting.num_workers,
        servers=strategy.traits.num_servers,
        step_s=step_s,
        iteration_s=step_s if strategy.traits.is_synchronous else step_s / setting.num_workers,
        samples_per_s=samples_per_s,
        efficiency=samples_per_s / (setting.num_workers * setting.alone_samples_per_s),
        compute_s=mean_s,
        waiting_s=slowest_s - mean_s,
        exchange_s=end_s - slowest_s,
        hidden_s=hidden_s,
        overhead_s=work.overhead_s,
        busiest=busiest,
        resource=resource,
        link_bytes=setting.link_bytes(loads),
        step_s_low=low_s + work.overhead_s,
        step_s_high=high_s + work.overhead_s,
    )
