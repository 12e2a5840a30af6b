"""What keeps more workers from being faster in proportion.

The time of n workers to a target is the samples it takes, times the worker-seconds a sample takes, over n. With n, the
samples may grow (larger global batches, staler gradients), and so may each part of the worker-seconds: compute (workers
share cores and memory), communication, waiting. Whichever lengthened the time by most is said to bind, unless seeds
differ by as much.
"""

import math
from dataclasses import dataclass

import pandas as pd

from paceline.lab import chance, words
from paceline.lab.chance import Sample
from paceline.lab.frames import FINISHED
from paceline.training import clock

SAMPLES, COMPUTE, COMMUNICATION, WAITING, NOTHING = "samples", "compute", "communication", "waiting", "nothing"
_PARTS = (COMPUTE, COMMUNICATION, WAITING)
_NEGLIGIBLE = 1.05
_BEYOND_SHARING = 0.5  # of the worker-seconds of fewer workers: sharing the same work explains no such fall


@dataclass(frozen=True)
class Costs:
    """One strategy on one number of workers, over its seeds."""

    workers: int
    servers: int
    time_s: float
    """To the target, mean over the seeds that reached it; NaN if none did."""
    samples: Sample
    """To the target, of the seeds that reached it."""
    worker_s: dict[str, Sample]
    """Seconds of one worker that one sample takes, by part, of the seeds that finished."""
    moved_per_s: Sample = Sample.of(())
    """Bytes that all workers exchange in a second, of the seeds that finished."""
    unit: str = "s"
    """The unit of times: real seconds or virtual ones."""

    @property
    def sample_s(self) -> float:
        return sum(part.mean for part in self.worker_s.values())

    def share(self, part: str) -> float:
        return self.worker_s[part].mean / self.sample_s


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
            grown = words.ratio(self.more.worker_s[COMPUTE].mean / self.fewer.worker_s[COMPUTE].mean)
            return f"computing binds: a sample takes {grown} times the compute time that it takes on {fewer}"
        grown = (
            f"{words.percent(self.more.share(self.what))} of the workers' time, "
            f"{words.percent(self.fewer.share(self.what))} on {fewer}"
        )
        if self._are_servers_full():
            rates = [words.quantity(costs.moved_per_s.mean / 1e6) for costs in (self.more, self.fewer)]
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
            and 0 < after.mean <= _NEGLIGIBLE * before.mean
            and self.more.worker_s[COMPUTE].mean <= _NEGLIGIBLE * self.fewer.worker_s[COMPUTE].mean
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
    sample_s = workers / chosen["samples_per_s"]
    return Costs(
        workers,
        int(chosen["servers"].iloc[0]),
        float(chosen["time_to_target_s"].mean()),
        Sample.of(chosen["samples_to_target"].dropna().tolist()),
        {part: Sample.of((sample_s * chosen[f"{part}_share"]).tolist()) for part in _PARTS},
        Sample.of((chosen["moved_bytes"] / chosen["training_time_s"]).tolist()),
        clock.unit(chosen["engine"].iloc[0]),
    )


def what_binds(fewer: Costs, more: Costs) -> Binding:
    """Compare by how much the growth of samples, and of each part of a sample's time, lengthened the whole."""
    costs = {SAMPLES: (fewer.samples, more.samples)}
    costs |= {part: (fewer.worker_s[part], more.worker_s[part]) for part in _PARTS}
    factors = {what: _factor(what, fewer, more) for what, (before, after) in costs.items() if _has_grown(before, after)}
    what = max(factors, key=lambda name: factors[name], default=NOTHING)
    if what == NOTHING or factors[what] <= _NEGLIGIBLE:
        return Binding(NOTHING, 1.0, fewer, more)
    return Binding(what, factors[what], fewer, more)


def _has_grown(before: Sample, after: Sample) -> bool:
    """Whether by more than chance explains."""
    return after.mean - before.mean > chance.margin(before, after)


def _factor(what: str, fewer: Costs, more: Costs) -> float:
    """By which the time would be shorter had this one cost not grown."""
    if what == SAMPLES:
        return more.samples.mean / fewer.samples.mean if fewer.samples.mean > 0 else math.inf
    without_s = more.sample_s - (more.worker_s[what].mean - fewer.worker_s[what].mean)
    return more.sample_s / without_s if without_s > 0 else math.inf
