"""One strategy on so many workers of a cluster: what a step takes, and what it takes it for. Closed forms only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.description import Cluster
from paceline.planner.cycles import Cycle, cycle_of
from paceline.planner.demand import StepWork
from paceline.planner.fabric import Busiest
from paceline.planner.question import Question
from paceline.strategies.base import Strategy
from paceline.strategies.traits import Unit

_FULL = 0.95  # of the time: a link that is so busy lets no further worker do more, however short each one's exchange is


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
    """Between two iterations, in the strategy's unit."""
    unit: Unit
    samples_per_s: float
    """Rate of all workers together; with backup workers, of those whose gradients count."""
    efficiency: float
    """`samples_per_s` over that of one worker alone, times the hosts of workers and of servers that have their own."""
    compute_s: float
    waiting_s: float
    exchange_s: float
    """For gradients and parameters to move, what backward hides left out, and for the servers' updates."""
    hidden_s: float
    overhead_s: float
    busiest: Busiest
    """What an exchange of all workers, a step each, keeps busy longest."""
    resource: str
    """What kind of thing that is: a server's card, a worker's card, a rack's cable, the core, the servers' own work."""
    link_bytes: Mapping[str, float] = field(default_factory=dict)
    """In a step of all workers, through the most loaded link of each kind, the fuller direction."""
    updates_a_step: float = 1.0
    """How often the parameters are updated while every worker takes a step: more than once where an update does not
    join all workers' work. A round counts as an update for each local step of the workers that it joins."""
    late_steps: float = 0.0
    """How many steps others take, on the average, between when a worker reads and when what it computed counts."""
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
        """What binds the exchange: the link or server that is busiest, or latency."""
        return self.resource if self.busiest.busy_s > (self.exchange_s + self.hidden_s) / 2 else "latency"

    @property
    def update_s(self) -> float:
        """Between two updates of the parameters."""
        return self.step_s / self.updates_a_step

    @property
    def shown_late_s(self) -> float:
        """From when parameters are good enough until the next iteration ends, the mean: only there a run is evaluated
        and stops. 0 but where an iteration is a round of several steps."""
        return (self.iteration_s - self.update_s) / 2

    @property
    def global_batch(self) -> float:
        """Samples an update is the mean of."""
        return self.samples_per_s * self.update_s


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
        UsageError: there is no such strategy, it does not say what it moves, the cluster has no room, or nothing says
            how long a step computes.
    """
    asked = Question.of(cluster, strategy=strategy, workers=workers, work=work, options=options)
    return _summed_up(asked, cycle_of(asked.traffic, asked.setting))


def _summed_up(asked: Question, cycle: Cycle) -> Prediction:
    """A step is the cycle's part, and what comes besides computing and exchange."""
    setting, num_steps = asked.setting, cycle.num_steps
    overhead_s = setting.work.overhead_s
    slowest_s, end_s = cycle.slowest_s / num_steps, cycle.end_s / num_steps
    step_s, mean_s = end_s + overhead_s, min(setting.mean_s, slowest_s)
    unit = asked.traits.unit
    num_updates = setting.num_workers if unit == "gradient" else cycle.num_updates
    iteration_s = step_s * num_steps / num_updates if unit == "round" else step_s / num_updates
    num_counted = setting.num_workers if cycle.num_counted is None else cycle.num_counted
    samples_per_s = num_counted * setting.work.samples / step_s
    num_paid = setting.num_workers + len(set(setting.places.servers) - set(setting.places.workers))
    loads = cycle.loads * (1 / num_steps)
    busiest, served_s = setting.fabric.busiest(loads), cycle.served_s / num_steps
    resource = setting.kind_of(busiest)
    if served_s > busiest.busy_s:
        resource = "the servers' own work"
        busiest = Busiest(resource, setting.work.parameter_bytes, served_s)
    low_s, high_s = cycle.bounds_s or (cycle.end_s, cycle.end_s)
    return Prediction(
        strategy=asked.name,
        workers=setting.num_workers,
        servers=asked.traits.num_servers,
        step_s=step_s,
        iteration_s=iteration_s,
        unit=unit,
        samples_per_s=samples_per_s,
        efficiency=samples_per_s / (num_paid * setting.alone_samples_per_s),
        compute_s=mean_s,
        waiting_s=slowest_s - mean_s,
        exchange_s=end_s - slowest_s,
        hidden_s=cycle.hidden_s / num_steps,
        overhead_s=overhead_s,
        busiest=busiest,
        resource=resource,
        link_bytes=setting.link_bytes(loads),
        updates_a_step=num_updates,
        late_steps=(num_updates - 1) * (num_steps if unit == "round" else 1),
        step_s_low=low_s / num_steps + overhead_s,
        step_s_high=high_s / num_steps + overhead_s,
    )
