"""What keeps more workers from being faster in proportion.

The time of n workers to a target is the samples it takes, times the worker-seconds a sample takes, over n. With n, the
samples may grow (larger global batches, staler gradients), and so may each part of the worker-seconds: compute (workers
share cores and memory), communication, waiting. Whichever lengthened the time by most is said to bind, unless chance
explains as much: growth is paired by seed, enters by its logarithm, and varies alike from every number of workers to
the next. Student's t decides, shared out over the four costs (Bonferroni).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import pandas as pd

from paceline.lab import words
from paceline.lab.chance import CONFIDENCE
from paceline.lab.frames import FINISHED
from paceline.training import clock

SAMPLES, COMPUTE, COMMUNICATION, WAITING, NOTHING = "samples", "compute", "communication", "waiting", "nothing"
_PARTS = (COMPUTE, COMMUNICATION, WAITING)
_NEGLIGIBLE = 1.05
_BEYOND_SHARING = 0.5  # of the worker-seconds of fewer workers: sharing the same work explains no such fall
_MIN_LEFT = 1e-9  # of a sample's time: without what grew, something is always left

PerSeed: TypeAlias = Mapping[int, float]


@dataclass(frozen=True)
class Costs:
    """One strategy on one number of workers, over its seeds."""

    workers: int
    servers: int
    time_s: float
    """Time to the target, mean over the seeds that reached it; NaN if none did."""
    samples: PerSeed
    """Samples to the target, of the seeds that reached it."""
    worker_s: Mapping[str, PerSeed]
    """Seconds of one worker that one sample takes, by part, of the seeds that finished."""
    moved_per_s: float = math.nan
    """Bytes that all workers exchange in a second, mean over the seeds that finished."""
    unit: str = "s"
    """The unit of times: real seconds or virtual ones."""

    @property
    def sample_s(self) -> float:
        return sum(map(self.part_s, self.worker_s))

    def part_s(self, part: str) -> float:
        return _mean(self.worker_s[part])

    def share(self, part: str) -> float:
        return self.part_s(part) / self.sample_s


@dataclass(frozen=True)
class Noise:
    """By how much the logarithm of a growth varies from seed to seed."""

    std: float
    freedom: int

    def explains(self, growths: Sequence[float]) -> bool:
        """Whether chance alone makes a mean as large as theirs; also where nothing is known of chance."""
        if self.freedom < 1 or not growths:
            return True
        from scipy.special import stdtrit

        critical = float(stdtrit(self.freedom, 1 - (1 - CONFIDENCE) / (1 + len(_PARTS))))
        return statistics.fmean(growths) <= critical * self.std / math.sqrt(len(growths))


@dataclass(frozen=True)
class Binding:
    """What lengthened the time by most from fewer workers to more."""

    what: str
    """One of the constants above; `nothing` where no cost grew by 5 %, or by more than chance explains."""
    factor: float
    """By which the time would be shorter had it not grown."""
    fewer: Costs
    more: Costs

    def __str__(self) -> str:
        """A clause: `waiting for other workers binds, with 45 % of the workers' time, 12 % on 10 workers`."""
        fewer = words.workers(self.fewer.workers)
        if self.what == NOTHING:
            before, after = (costs.time_s * costs.workers for costs in (self.fewer, self.more))
            if after < _BEYOND_SHARING * before:
                return (
                    f"the time falls by more than workers can share out: look for what else held up {fewer}, such as "
                    "other work on the machine"
                )
            if self.more.time_s < self.fewer.time_s and after <= _NEGLIGIBLE * before:
                return "nothing binds: the time falls in proportion"
            return "no single cost stands out"
        if self.what == SAMPLES:
            return f"statistical efficiency binds: it takes {words.ratio(self.factor)} times the samples of {fewer}"
        if self.what == COMPUTE:
            grown = words.ratio(self.more.part_s(COMPUTE) / self.fewer.part_s(COMPUTE))
            return f"computing binds: a sample takes {grown} times the compute time that it takes on {fewer}"
        grown = (
            f"{words.percent(self.more.share(self.what))} of the workers' time, "
            f"{words.percent(self.fewer.share(self.what))} on {fewer}"
        )
        if self._are_servers_full():
            rates = [words.quantity(costs.moved_per_s / 1e6) for costs in (self.more, self.fewer)]
            return (
                f"the servers or their links bind: {rates[0]} MB/{self.more.unit} cross them, {rates[1]} on {fewer}, "
                f"and communication takes {grown}"
            )
        return f"{self._activity()} binds, with {grown}"

    def _are_servers_full(self) -> bool:
        """Whether the servers give all workers together no more than they gave fewer of them.

        Each then gets less, though nobody computes longer (as where all share one machine's cores), nor waits for
        another. Whether it is a server's link or its work, records do not tell.
        """
        before, after = self.fewer.moved_per_s, self.more.moved_per_s
        return (
            self.what == COMMUNICATION
            and self.fewer.servers == self.more.servers > 0
            and self.more.workers > _NEGLIGIBLE * self.fewer.workers
            and 0 < after <= _NEGLIGIBLE * before
            and self.more.part_s(COMPUTE) <= _NEGLIGIBLE * self.fewer.part_s(COMPUTE)
        )

    def _activity(self) -> str:
        """Waiting is for other workers, under servers, too: what a server makes a worker wait for is communication."""
        if self.what == COMMUNICATION:
            return "communication with the servers" if self.more.servers > 0 else "communication among workers"
        return "waiting for other workers"


def costs_of(trials: pd.DataFrame, *, strategy: str, workers: int) -> Costs | None:
    """None where no trial of that combination trained to its end."""
    chosen = trials[(trials["strategy"] == strategy) & (trials["workers"] == workers)]
    chosen = chosen[(chosen["status"] == FINISHED) & (chosen["samples_per_s"] > 0) & chosen["compute_share"].notna()]
    if chosen.empty:
        return None
    by_seed = chosen.set_index("seed")
    sample_s = workers / by_seed["samples_per_s"]
    return Costs(
        workers,
        int(chosen["servers"].iloc[0]),
        float(chosen["time_to_target_s"].mean()),
        by_seed["samples_to_target"].dropna().to_dict(),
        {part: (sample_s * by_seed[f"{part}_share"]).to_dict() for part in _PARTS},
        float((chosen["moved_bytes"] / chosen["training_time_s"]).mean()),
        clock.unit(chosen["engine"].iloc[0]),
    )


def noise_in(trials: pd.DataFrame) -> dict[str, Noise]:
    """How the growth of each cost varies, from every strategy's numbers of workers to the next."""
    pairs = []
    for strategy, own in trials.groupby("strategy", sort=False):
        found = [costs_of(own, strategy=str(strategy), workers=n) for n in sorted(own["workers"].unique().tolist())]
        pairs += list(pairwise([costs for costs in found if costs is not None]))
    return noise_of(pairs)


def noise_of(pairs: Sequence[tuple[Costs, Costs]]) -> dict[str, Noise]:
    """Pooled over pairs of fewer and more workers."""
    noise = {}
    for what in (SAMPLES, *_PARTS):
        groups = [growths for pair in pairs if len(growths := _growths(what, *pair)) > 1]
        freedom = sum(len(group) - 1 for group in groups)
        squares = sum(statistics.variance(group) * (len(group) - 1) for group in groups)
        noise[what] = Noise(math.sqrt(squares / freedom) if freedom else math.nan, freedom)
    return noise


def what_binds(fewer: Costs, more: Costs, noise: Mapping[str, Noise]) -> Binding:
    """Compare by how much the growth of samples, and of each part of a sample's time, lengthened the whole."""
    grown = [what for what in (SAMPLES, *_PARTS) if not noise[what].explains(_growths(what, fewer, more))]
    factors = {what: _factor(what, fewer, more) for what in grown}
    what = max(factors, key=lambda name: factors[name], default=NOTHING)
    if what == NOTHING or factors[what] <= _NEGLIGIBLE:
        return Binding(NOTHING, 1.0, fewer, more)
    return Binding(what, factors[what], fewer, more)


def _growths(what: str, fewer: Costs, more: Costs) -> list[float]:
    """Logarithms of the factor by which each seed's time would be shorter had this one cost not grown."""
    if what == SAMPLES:
        common = sorted(fewer.samples.keys() & more.samples.keys())
        counts = [(fewer.samples[seed], more.samples[seed]) for seed in common]
        return [math.log(after / before) for before, after in counts if min(before, after) > 0]
    before, after = fewer.worker_s[what], more.worker_s[what]
    growths = []
    for seed in sorted(before.keys() & after.keys()):
        whole_s = sum(part[seed] for part in more.worker_s.values())
        growths.append(-math.log(max(1 - (after[seed] - before[seed]) / whole_s, _MIN_LEFT)))
    return growths


def _factor(what: str, fewer: Costs, more: Costs) -> float:
    """By which the mean time would be shorter had this one cost not grown."""
    if what == SAMPLES:
        return _mean(more.samples) / _mean(fewer.samples)
    without_s = more.sample_s - (more.part_s(what) - fewer.part_s(what))
    return more.sample_s / without_s if without_s > 0 else math.inf


def _mean(values: PerSeed) -> float:
    return statistics.fmean(values.values()) if values else math.nan
