"""How long a worker computes a step: the mean, and what chance makes of it."""

import math
import random
from typing import final

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.seeding import derive

_GIGA = 1e9


@final
class ComputeTimes:
    """Draws one worker's step times and pauses, from a generator of its own."""

    def __init__(self, compute: Compute, *, seed: int, rank: int) -> None:
        self._compute = compute
        self._random = random.Random(derive(seed, "compute", rank))
        self._step = self._random.randrange(len(compute.trace_s)) if compute.trace_s else 0
        self._mean_trace_s = math.fsum(compute.trace_s) / len(compute.trace_s) if compute.trace_s else 1.0
        self._sigma = math.sqrt(math.log1p(compute.variation**2)) if compute.variation else 0.0
        self._until_pause_s = self._next_pause_s()

    def draw(self, mean_s: float) -> float:
        """How long the next step takes, in seconds, of steps that take `mean_s` on average."""
        duration_s = mean_s * self._factor()
        self._until_pause_s -= duration_s
        while self._until_pause_s <= 0:
            duration_s += self._compute.pause_s
            self._until_pause_s += self._next_pause_s()
        return duration_s

    def _factor(self) -> float:
        compute = self._compute
        if compute.distribution == "log-normal":
            return math.exp(self._random.gauss(-(self._sigma**2) / 2, self._sigma))
        if compute.distribution == "exponential":
            return self._random.expovariate(1.0)
        if compute.distribution == "trace":
            self._step += 1
            return compute.trace_s[(self._step - 1) % len(compute.trace_s)] / self._mean_trace_s
        return 1.0

    def _next_pause_s(self) -> float:
        """Seconds of computing until the next pause."""
        rate = self._compute.pauses_per_hour / 3600
        return self._random.expovariate(rate) if rate else math.inf


@final
class StepCost:
    """The mean time of a training step on a host whose cores, or devices, `num_sharing` workers share. `beside`: of a
    worker that has begun before, whose first step had the samples that `step_s` speaks of."""

    def __init__(self, cluster: Cluster, host: Hosts, *, num_sharing: int, beside: "StepCost | None" = None) -> None:
        self._compute = cluster.compute
        share = min(1.0, host.devices / num_sharing) if host.devices else 1.0 / num_sharing
        cores = host.cores if cluster.shared_cores is None else 1
        self._host_speed = host.speed
        self._core_speed = host.speed * min(1.0, cores / num_sharing)
        self._speed = host.speed * share
        self._flop_per_s = (host.gflop_per_s or 0.0) * _GIGA * (1 if host.devices else cores) * self._speed
        self._reference_samples: int | None = beside._reference_samples if beside is not None else None

    def on_this_host_s(self, seconds: float) -> float:
        """What takes a core of a host of speed 1 so long."""
        return seconds / self._host_speed

    def seconds(
        self, *, num_samples: int, forward_flop: float, forward_calls: int = 0, is_training: bool = True
    ) -> float:
        """The time of a forward and a backward pass over `num_samples`. Where operations are counted, those of the
        backward pass are taken to be so many that it takes `backward_share` of the time.

        Args:
            forward_calls: operations that the forward pass calls; each takes a core's time, whatever its size.
            is_training: the batch may be the first that is trained on, of which `step_s` speaks. An evaluation before
                that has other batches; it is taken to last a step for each.
        """
        if self._reference_samples is None and is_training:
            self._reference_samples = num_samples
        compute = self._compute
        if compute.sample_s is not None:
            return compute.sample_s * num_samples / self._speed
        if compute.reference_s is not None:
            return compute.reference_s * num_samples / (self._reference_samples or num_samples) / self._speed
        called_s = forward_calls * compute.dispatch_us * 1e-6 / self._core_speed
        return forward_flop / (1 - compute.backward_share) / self._flop_per_s + called_s
