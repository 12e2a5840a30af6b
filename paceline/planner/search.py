"""The search: every strategy, number of workers and number of servers that a cluster holds, and which is best."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, final

import pandas as pd

from paceline.cluster.description import Cluster
from paceline.cluster.placement import place
from paceline.codec import Codec
from paceline.errors import UsageError
from paceline.lab import words
from paceline.lab.variant import Variant
from paceline.planner.apart import Apart
from paceline.planner.coded import leaves_out_little
from paceline.planner.demand import Demand, StepWork
from paceline.planner.noise import NoiseScale, steps_ratio
from paceline.planner.predict import Prediction, predict
from paceline.planner.question import why_unpriced
from paceline.planner.simulator import simulate
from paceline.strategies import STRATEGIES, build
from paceline.strategies.base import Strategy
from paceline.strategies.traits import Traits

CLOSE = 0.05
"""What differs by less is as good: then fewer workers or servers are better."""
Unranked = Literal["no noise scale", "no rule", "codec"]
"""Why what a strategy takes is shown and not ranked: how many more steps workers need whose models differ follows from
a noise scale, or from nothing that a plan knows; nor does it know how many more a codec costs that leaves out much."""
PERIODS = (2, 5, 10, 20)
"""Steps of a round that are looked at besides a strategy's own."""
_WITH_ROWS = tuple(f"all-reduce:servers={servers}" for servers in (1, 2, 4))
_EXTRA = ("all-reduce:codec=auto:codec.among=bf16+int8",)  # what a codec that costs no accuracy would gain
_HALF = 0.5
_CHECK_EVENTS = 200_000  # about as many gradients are simulated for each check


@dataclass(frozen=True)
class Point:
    """One strategy, number of workers and number of servers."""

    label: str
    """As `paceline compare --strategies` takes it."""
    asked: str
    """The name that it is one of the choices for."""
    prediction: Prediction
    batch: int
    speedup: float
    """Samples per second over one worker's."""
    target_speedup: float | None
    """One worker's time to the target over this one's; none where no statistical efficiency is known."""
    target_s: float | None
    """Time to the target; none where one worker's steps to it are not known."""
    drift: float = 1.0
    """How many times the steps are taken that workers would need if they averaged every gradient."""
    unranked: Unranked | None = None

    @property
    def is_ranked(self) -> bool:
        return self.unranked is None

    @property
    def merit(self) -> float:
        """What is to be large."""
        return self.speedup if self.target_speedup is None else self.target_speedup


@dataclass(frozen=True)
class Knee:
    """Beyond so many workers another one adds less than half of what one alone does."""

    label: str
    strategy: str
    servers: int
    workers: int | None
    """None: not up to as many as were looked at."""
    resource: str


@dataclass(frozen=True)
class Check:
    """The simulator beside the closed form."""

    label: str
    workers: int
    predicted_s: float
    simulated_s: float

    @property
    def deviation(self) -> float:
        """The closed form's relative error beside the simulator; above 0 where it predicts a longer time."""
        return self.predicted_s / self.simulated_s - 1


@final
@dataclass(frozen=True)
class Plan:
    """What was found. `points` has every combination, `best` the one to take."""

    cluster: Cluster
    work: StepWork
    points: tuple[Point, ...]
    best: Point
    knees: tuple[Knee, ...]
    checks: tuple[Check, ...]
    noise: NoiseScale | None
    target_batch: int | None
    unpriced: tuple[str, ...]
    """Strategies that have no price: they do not say what they move."""

    @property
    def is_counted(self) -> bool:
        """Whether how long a step computes follows from its operations and not from a measured time."""
        return self.work.step_s is None and self.cluster.compute.is_counted

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a point; times in seconds, bytes a step of all workers."""
        return pd.DataFrame([_row(point) for point in self.points])

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """By label, against the number of workers."""
        once = {(point.label, point.prediction.workers): point for point in self.points}  # whoever asked for it
        labels = dict.fromkeys(label for label, _ in once)
        return {label: [point for point in once.values() if point.label == label] for label in labels}

    @property
    def best_of_each(self) -> list[Point]:
        """Each strategy's best point, over numbers of workers and servers, and steps of a round."""
        names = dict.fromkeys(point.asked for point in self.points)
        return [best_of([point for point in self.points if point.asked == name]) for name in names]

    @property
    def ranked(self) -> list[Point]:
        """Those of them that compare, the best first."""
        return sorted((point for point in self.best_of_each if point.is_ranked), key=lambda point: -point.merit)


def require_in_range(
    cluster: Cluster,
    *,
    max_workers: int | None,
    target_batch: int | None,
    has_noise: bool,
    single_steps: float | None,
    staleness_penalty: float,
) -> None:
    """Raises UsageError if a number that `plan` is given is out of range, or the cluster has no room for a worker."""
    room = cluster.num_slots
    if not room:
        raise UsageError("the cluster has no room for a worker; raise workers in its [[hosts]]")
    if max_workers is not None and not 1 <= max_workers <= room:
        raise UsageError(
            f"max-workers must be 1 to {room}, for which the cluster has room, not {max_workers}; "
            "to plan for more, raise count or workers in its [[hosts]]"
        )
    if target_batch is not None and target_batch < 1:
        raise UsageError(f"target-batch must be at least 1, not {target_batch}")
    if not 0 <= staleness_penalty < math.inf:
        raise UsageError(f"staleness-penalty must be a number from 0, not {staleness_penalty}")
    if single_steps is not None and not has_noise:
        raise UsageError("steps to the target of one worker need a noise scale; give --noise-scale N or measure")
    if single_steps is not None and not 0 < single_steps < math.inf:
        raise UsageError(f"steps to the target of one worker must be above 0, not {single_steps}")


def plan(
    cluster: Cluster,
    work: StepWork,
    *,
    strategies: Sequence[str] | None = None,
    max_workers: int | None = None,
    target_batch: int | None = None,
    noise: NoiseScale | None = None,
    single_steps: float | None = None,
    staleness_penalty: float = 1.0,
    num_checks: int = 3,
) -> Plan:
    """Predict every strategy on 1, 2, 3, 4, 6, 8, 12, ... workers and 1, 2, 4, ... servers, and check the best.

    Args:
        work: of one worker's step.
        strategies: as `paceline compare` takes them; one without options stands for all choices of servers and steps of
            a round. None: all that move something different.
        max_workers: none: as many as the cluster holds.
        target_batch: samples of all workers' step together; each takes its part, at least one. None: every worker
            keeps its batch.
        noise: the gradient noise scale; then what counts is time to target rather than samples per second.
        single_steps: optimizer steps to the target of one worker with the script's batch: makes times absolute, and
            has runs of rounds end with a whole one.
        staleness_penalty: what an update of staleness counts, see `NoiseScale.steps`; 0: it does no harm.
        num_checks: of the best strategies, simulated.

    Raises:
        UsageError: a number is out of range, a strategy is unknown or none has a price, or the cluster has no room.
    """
    require_in_range(
        cluster,
        max_workers=max_workers,
        target_batch=target_batch,
        has_noise=noise is not None,
        single_steps=single_steps,
        staleness_penalty=staleness_penalty,
    )
    most = min(max_workers or cluster.num_slots, target_batch or cluster.num_slots)
    judge = _Judge(cluster, work, target_batch, noise, single_steps, staleness_penalty)
    asked = (
        [*_names(), *(_WITH_ROWS if work.rows is not None else _EXTRA)]
        if strategies is None
        else [*dict.fromkeys(Variant.parse(text).text for text in strategies)]
    )
    unpriced = tuple(text for text in asked if why_unpriced(build(text).traits, work) is not None)
    priced = [text for text in asked if text not in unpriced]
    points = [judge.point(text, *choice) for text in priced for choice in _choices(cluster, text, most, work.demand)]
    ranked = [point for point in points if point.is_ranked]
    if not ranked:
        raise UsageError(f"none of {words.listed(asked)} can be ranked on this cluster; add all-reduce or single")
    best = best_of(ranked)
    found = Plan(cluster, work, tuple(points), best, (), (), noise, target_batch, unpriced)
    knees = tuple(_knee(judge, curve) for curve in found.curves.values() if len(curve) > 1)
    return replace(found, knees=knees, checks=tuple(judge.check(point) for point in found.ranked[:num_checks]))


def best_of(points: Sequence[Point]) -> Point:
    """The one with the fewest workers, then servers, of those that are within 5 % of the best; of equal ones the first,
    which is the simplest."""
    top = max(point.merit for point in points)
    close = [point for point in points if point.merit >= (1 - CLOSE) * top]
    return min(close, key=lambda point: (point.prediction.workers, point.prediction.servers, -round(point.merit, 6)))


def worker_counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the most."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return sorted({count for power in powers for count in (power, power * 3 // 2) if count <= most} | {most})


def _names() -> list[str]:
    """One name for all under which the same is moved: with other options for the arithmetic it takes as long. None of
    what another library's scripts do by themselves, which is no choice for this one."""
    names: list[str] = []
    for name, entry in STRATEGIES.items():
        if _traits(name).by_script:
            continue
        alike = (STRATEGIES[other].strategy is entry.strategy and _traits(other) == _traits(name) for other in names)
        if not any(alike):
            names.append(name)
    return names


def _traits(name: str) -> Traits:
    return build(name).traits


def _choices(cluster: Cluster, text: str, most: int, demand: Demand | None) -> Iterator[tuple[Strategy, int]]:
    """The strategy on numbers of workers that it can run with; one without options with 1, 2, 4, ... servers, where it
    has some, and with rounds of several lengths, where workers average them."""
    own, options = build(text), STRATEGIES[text].options if text in STRATEGIES else ()
    has_servers = "servers" in options and own.traits.num_servers > 0
    has_rounds = "every" in options and own.traits.unit == "round" and Apart.of(own.traits, 1) is not None
    for workers in worker_counts(most):
        counts = [2**exponent for exponent in range(workers.bit_length())]
        choices = [{"servers": servers} for servers in counts] if has_servers else [{}]
        choices += [{"every": every} for every in PERIODS] if has_rounds and workers > 1 else []
        for strategy in (build(text, each) for each in choices):
            is_refused = demand is not None and not demand.allows_servers(strategy.traits)
            if not is_refused and _can_run(cluster, strategy, workers):
                yield strategy, workers


def _can_run(cluster: Cluster, strategy: Strategy, workers: int) -> bool:
    try:
        strategy.check(num_workers=workers)
        place(cluster, num_workers=workers, num_servers=strategy.traits.num_servers)
    except UsageError:
        return False
    return True


@final
@dataclass(frozen=True)
class _Judge:
    cluster: Cluster
    work: StepWork
    target_batch: int | None
    noise: NoiseScale | None
    single_steps: float | None
    staleness_penalty: float

    def predict(self, strategy: Strategy, workers: int) -> Prediction:
        return predict(self.cluster, strategy=strategy, workers=workers, work=self._work_of(workers))

    def point(self, asked: str, strategy: Strategy, workers: int) -> Point:
        prediction = self.predict(strategy, workers)
        speedup = prediction.samples_per_s / self.base.samples_per_s
        apart = None if _is_alike(strategy.traits, workers) else Apart.of(strategy.traits, workers)
        target_speedup = target_s = None
        drift = 1.0
        if self.noise is not None:
            each = max(1.0, prediction.global_batch)
            late = self.staleness_penalty * prediction.late_steps
            steps = steps_ratio(self.noise, batch=each, base_batch=self.work.samples, staleness=late)
            if apart is not None:
                joined = workers / prediction.updates_a_step
                drift = apart.drift(self.noise, batch=each / joined, num_workers=joined)
            taken_s, alone_s = steps * drift * prediction.update_s, self.base.update_s
            if self.single_steps is not None:
                target_s = taken_s = self.single_steps * taken_s + prediction.shown_late_s
                alone_s *= self.single_steps
            target_speedup = alone_s / taken_s
        return Point(
            label=Variant.of(strategy).text,
            asked=asked,
            prediction=prediction,
            batch=self._batch(workers),
            speedup=speedup,
            target_speedup=target_speedup,
            target_s=target_s,
            drift=drift,
            unranked=self._why_unranked(strategy.traits, apart, workers),
        )

    def _why_unranked(self, traits: Traits, apart: Apart | None, workers: int) -> Unranked | None:
        if workers > 1 and any(not leaves_out_little(codec) for codec in _codecs(traits)):
            return "codec"
        if _is_alike(traits, workers):
            return None
        if apart is None:
            return "no rule"
        return "no noise scale" if self.noise is None else None

    def check(self, point: Point) -> Check:
        found, strategy = point.prediction, Variant.parse(point.label).strategy
        steps = max(40, min(400, _CHECK_EVENTS // found.workers))
        work = self._work_of(found.workers)
        simulated = simulate(self.cluster, strategy=strategy, workers=found.workers, work=work, steps=steps)
        return Check(point.label, found.workers, found.step_s, simulated.step_s)

    @cached_property
    def base(self) -> Prediction:
        """One worker with the script's own batch, and no exchange."""
        return predict(self.cluster, strategy="single", workers=1, work=self.work)

    def _work_of(self, workers: int) -> StepWork:
        """With each worker's part of the batch: a step takes in proportion."""
        return self.work.of_batch(self._batch(workers), step_s=self.cluster.compute.reference_s)

    def _batch(self, workers: int) -> int:
        return self.work.samples if self.target_batch is None else max(1, math.ceil(self.target_batch / workers))


def _is_alike(traits: Traits, workers: int) -> bool:
    return workers == 1 or not (traits.workers_differ or traits.unit == "round")


def _codecs(traits: Traits) -> list[Codec]:
    return [each.codec for each in traits.traffic or () if each.codec is not None]


def _knee(judge: _Judge, curve: Sequence[Point]) -> Knee:
    """Between the first two numbers of workers where the curve rises by less than half of one worker alone for each."""
    label, first, strategy = curve[0].label, curve[0].prediction, Variant.parse(curve[0].label).strategy
    least = _HALF * judge.base.samples_per_s

    def gain(workers: int) -> float:
        return judge.predict(strategy, workers).samples_per_s - judge.predict(strategy, workers - 1).samples_per_s

    for before, after in pairwise(point.prediction for point in curve):
        rise = (after.samples_per_s - before.samples_per_s) / (after.workers - before.workers)
        if rise < least:
            low = before.workers if before is not first else _fewest_workers(strategy, before.workers)
            # The last number of workers that another one added at least so much to.
            workers = low + bisect_left(range(low + 1, after.workers), True, key=lambda n: gain(n) < least)
            return Knee(label, first.strategy, first.servers, workers, after.bottleneck)
    return Knee(label, first.strategy, first.servers, None, curve[-1].prediction.binding)


def _fewest_workers(strategy: Strategy, most: int) -> int:
    """How few workers the strategy takes. It takes `most`."""

    def is_enough(num_workers: int) -> bool:
        try:
            strategy.check(num_workers=num_workers)
        except UsageError:
            return False
        return True

    return next(num_workers for num_workers in range(1, most + 1) if is_enough(num_workers))


def _row(point: Point) -> dict[str, Any]:
    found = {name: value for name, value in asdict(point.prediction).items() if name not in ("busiest", "link_bytes")}
    row = {"label": point.label, "batch": point.batch, "speedup": point.speedup, "drift": point.drift, **found}
    row |= {"target_speedup": point.target_speedup, "target_s": point.target_s}
    row |= {"busiest": point.prediction.busiest.name, "busiest_bytes": point.prediction.busiest.num_bytes}
    row |= {"utilisation": point.prediction.utilisation, "binding": point.prediction.binding}
    return row | {f"bytes, {kind}": num_bytes for kind, num_bytes in point.prediction.link_bytes.items()}
