"""What failures cost: how long a run takes, and at what price, on hosts that fail, are taken away and come back."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.description import Cluster, Hosts
from paceline.cluster.placement import place
from paceline.elastic import Elastic
from paceline.lab.variant import Variant
from paceline.planner.demand import StepWork
from paceline.planner.predict import Prediction, predict
from paceline.planner.search import CLOSE, Plan, Point

Way = Literal["restart", "elastic"]
DAY_S = 86_400.0
"""What a run would take without failures, where no plan says how long it is."""
_HOPELESS = 500.0  # e to this is beyond any number of tries


def checkpoint_interval_s(checkpoint_s: float, between_s: float) -> float:
    """The time from one checkpoint to the next with which a run ends soonest, where checkpoints take so long and
    failures come so far apart: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    FGCS 22(3), 2006. To first order it is sqrt(2 C M) (Young, CACM 17(9), 1974)."""
    if checkpoint_s >= 2 * between_s:
        return between_s
    ratio = checkpoint_s / (2 * between_s)
    return math.sqrt(2 * checkpoint_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def restarted_s(work_s: float, *, every_s: float, checkpoint_s: float, between_s: float, restart_s: float) -> float:
    """How long so much work takes where each failure, which comes by chance, throws it back to the last checkpoint. As
    in Daly 2006, but that nothing fails while nothing runs; there it is M exp(R/M) where this has M + R."""
    if math.isinf(between_s):
        return work_s
    tried = (every_s + checkpoint_s) / between_s
    if math.isinf(restart_s) or tried > _HOPELESS:
        return math.inf
    return (between_s + restart_s) * math.expm1(tried) * work_s / every_s


def shrinking_s(work_s: float, *, gone_per_s: float) -> float:
    """How long so much work of all takes where each worker goes for good at this rate, and the others go on: the share
    that is left at a time t is exp(-rate t)."""
    left = 1 - work_s * gone_per_s
    return -math.log(left) / gone_per_s if left > 0 else math.inf


def kept_rates(workers: int, *, compute_s: float, exchange_s: float) -> NDArray[np.float64]:
    """What 0, 1, ... workers do, as parts of what all do, where an update keeps its samples: fewer take them in more
    rounds, each with an exchange."""
    there = np.arange(1, workers + 1)
    update_s = compute_s * workers / there + np.ceil(workers / there) * exchange_s
    return np.concatenate([[0.0], (compute_s + exchange_s) / update_s])


def mean_rate(rates: NDArray[np.float64], *, away: float) -> float:
    """The mean over how many workers are there, each of which is away for this part of the time."""
    if not away:
        return float(rates[-1])
    workers = len(rates) - 1
    there = np.arange(workers + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, workers + 1)))])
    logs = factorials[-1] - factorials - factorials[::-1]
    logs += there * math.log1p(-away) + there[::-1] * math.log(away)
    return float((np.exp(logs) * rates).sum())


@final
@dataclass(frozen=True)
class Outcome:
    """One strategy's best, or another point, and how it gets over failures."""

    point: Point
    way: Way
    between_s: float
    """From one failure or preemption of any of its hosts to the next, on average."""
    work_s: float
    """What it would take without."""
    time_s: float
    cost: float
    every: int | None = None
    """Iterations between checkpoints, with which it ends soonest; none: there are no failures, or it needs none."""

    @property
    def goodput(self) -> float:
        return self.work_s / self.time_s

    @property
    def merit(self) -> float:
        """As the point's, of which failures leave a part."""
        return self.point.merit * self.goodput


@final
@dataclass(frozen=True)
class _Used:
    """Hosts of a run."""

    cluster: Cluster
    workers: tuple[tuple[Hosts, int], ...]
    """Each kind of hosts with workers, and how many workers are on them."""
    others: tuple[tuple[Hosts, int], ...]
    """Hosts that servers have to themselves, and how many there are."""
    spares: int

    @classmethod
    def by(cls, cluster: Cluster, point: Point) -> "_Used":
        places = place(cluster, num_workers=point.prediction.workers, num_servers=point.prediction.servers)
        kind_of = [number for number, kind in enumerate(cluster.hosts) for _ in range(kind.count)]
        others = set(places.servers) - set(places.workers)
        used = (Counter(map(kind_of.__getitem__, hosts)) for hosts in (places.workers, others))
        workers, servers = (tuple((cluster.hosts[kind], count) for kind, count in each.items()) for each in used)
        return cls(cluster, workers, servers, cluster.num_slots - len(places.workers) - len(others))

    def failures_per_s(self, host: Hosts) -> float:
        return (self.cluster.compute.failures_per_hour + host.preemptions_per_hour) / 3600

    @property
    def all_per_s(self) -> float:
        """Failures and preemptions of all hosts; workers of one host go together."""
        of_workers = math.fsum(self.failures_per_s(kind) * count / kind.slots for kind, count in self.workers)
        return of_workers + math.fsum(self.failures_per_s(kind) * count for kind, count in self.others)

    def price_per_s(self, *, there: float = 1.0) -> float:
        """`there`: the part of the time that workers have their hosts."""
        of_workers = math.fsum(kind.worker_per_hour * count for kind, count in self.workers)
        return (there * of_workers + math.fsum(kind.paid_per_hour * count for kind, count in self.others)) / 3600

    def away_s(self, work_s: float) -> float:
        """Until another worker's process has started: on a host that is free, where there are more than are away on
        average, or on the one that comes back."""
        start_s = self.cluster.recovery.start_s
        back_s = max(math.inf if kind.back_after_s is None else kind.back_after_s for kind, _ in self.workers)
        return start_s if self.spares > self.all_per_s * min(back_s, work_s) else start_s + back_s


def on_demand(cluster: Cluster) -> Cluster:
    """The same hosts, which nobody takes away, at their full price."""
    kinds = (replace(kind, preemptions_per_hour=0.0, notice_s=0.0, spot_price_per_hour=None) for kind in cluster.hosts)
    return replace(cluster, hosts=tuple(kinds))


@final
class Survey:
    """All that was planned, in spite of failures."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def of(self, point: Point) -> list[Outcome]:
        """With restarts from checkpoints, and with --elastic where the strategy can."""
        used, work = _Used.by(self._plan.cluster, point), self._plan.work
        found = [_restarting(work, used, point)]
        if Variant.parse(point.label).strategy.traits.repeats_steps and point.prediction.workers > 1:
            found.append(_elastic(work, used, point, _with_whole_weights(self._plan, point)))
        return found

    @cached_property
    def outcomes(self) -> list[Outcome]:
        return [outcome for point in self._plan.points for outcome in self.of(point)]

    @property
    def best_of_each(self) -> list[Outcome]:
        """Of each strategy the point and the way that get furthest."""
        names = dict.fromkeys(outcome.point.prediction.strategy for outcome in self.outcomes)
        return [_best([each for each in self.outcomes if each.point.prediction.strategy == name]) for name in names]

    @property
    def first(self) -> Outcome:
        """What gets there first, of what is ranked."""
        return _best([each for each in self.outcomes if each.point.is_ranked])


def _best(found: list[Outcome]) -> Outcome:
    """As plans without failures choose: the one with the fewest workers, then servers, of those that are as good."""
    top = max(outcome.merit for outcome in found)
    close = [outcome for outcome in found if outcome.merit >= (1 - CLOSE) * top]
    return min(close, key=lambda each: (each.point.prediction.workers, each.point.prediction.servers, -each.merit))


def _work_s(point: Point) -> float:
    return DAY_S if point.target_s is None else point.target_s


def _state_bytes(work: StepWork) -> float:
    return work.parameter_bytes + work.state_bytes


def _restarting(work: StepWork, used: _Used, point: Point) -> Outcome:
    work_s, per_s = _work_s(point), used.all_per_s
    if not per_s:
        return Outcome(point, "restart", math.inf, work_s, work_s, work_s * used.price_per_s())
    between_s, iteration_s = 1 / per_s, point.prediction.iteration_s
    memory_gbyte_per_s = used.workers[0][0].memory_gbyte_per_s
    checkpoint_s = used.cluster.recovery.checkpoint_s + _state_bytes(work) / (memory_gbyte_per_s * 1e9)
    wanted_s = min(checkpoint_interval_s(checkpoint_s, between_s), work_s)
    every = max(1, round(wanted_s / iteration_s))
    time_s = restarted_s(
        work_s,
        every_s=every * iteration_s,
        checkpoint_s=checkpoint_s,
        between_s=between_s,
        restart_s=used.away_s(work_s),
    )
    return Outcome(point, "restart", between_s, work_s, time_s, time_s * used.price_per_s(), every)


def _with_whole_weights(plan: Plan, point: Point) -> Prediction:
    """What the point's strategy does in an elastic run, where rows of weights do not move by themselves."""
    if not plan.work.weights:
        return point.prediction
    work = plan.work.of_batch(point.batch, step_s=plan.cluster.compute.reference_s)
    strategy, workers = Variant.parse(point.label).strategy, point.prediction.workers
    return predict(plan.cluster, strategy=strategy, workers=workers, work=replace(work, weights=()))


def _elastic(work: StepWork, used: _Used, point: Point, found: Prediction) -> Outcome:
    """`found`: what it does without failures; a run that is not elastic may be faster."""
    recovery, per_s, planned_s = used.cluster.recovery, used.all_per_s, _work_s(point)
    work_s = planned_s * found.step_s / point.prediction.step_s
    if not per_s:
        return Outcome(point, "elastic", math.inf, planned_s, work_s, work_s * used.price_per_s())
    each_per_s = math.fsum(used.failures_per_s(kind) * count for kind, count in used.workers) / found.workers
    if math.isinf(used.away_s(work_s)):
        time_s = shrinking_s(work_s, gone_per_s=each_per_s)
        there = work_s / time_s
        return Outcome(point, "elastic", 1 / per_s, planned_s, time_s, time_s * used.price_per_s(there=there))
    bytes_per_s = min(kind.up_gbit_per_s or kind.bandwidth_gbit_per_s for kind, _ in used.workers) * 1e9 / 8
    away_s = used.away_s(work_s) + _state_bytes(work) / bytes_per_s + found.iteration_s
    away = each_per_s * away_s / (1 + each_per_s * away_s)
    is_kept = Variant.parse(point.label).strategy.traits.lock_step
    exchange_s = found.exchange_s if is_kept else 0.0
    rate = mean_rate(kept_rates(found.workers, compute_s=found.step_s - exchange_s, exchange_s=exchange_s), away=away)
    pauses = (1 - away) * math.fsum(
        count * _pauses(used, kind, found.iteration_s, found.workers) for kind, count in used.workers
    )
    pauses += (1 - away) * found.workers * each_per_s * recovery.reform_s  # as many join
    time_s = work_s * (1 + pauses) / rate
    return Outcome(point, "elastic", 1 / per_s, planned_s, time_s, time_s * used.price_per_s(there=1 - away))


def _pauses(used: _Used, host: Hosts, iteration_s: float, workers: int) -> float:
    """Seconds a second that all wait since workers of such a host go, and what one had computed counts as such."""
    reform_s = used.cluster.recovery.reform_s
    leaving = host.preemptions_per_hour / 3600 if host.notice_s > iteration_s else 0.0
    dying = used.failures_per_s(host) - leaving
    return dying * (Elastic.deadline_s + reform_s + iteration_s / workers) + leaving * reform_s
