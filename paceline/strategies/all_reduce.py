"""All-reduce: every worker updates its own copy with the mean of all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, final, get_args

import torch
from torch import Tensor

from paceline.buckets import GradientBuckets
from paceline.comm.algorithms import ALGORITHMS, AlgorithmWork
from paceline.comm.base import Collective, Timing, Work
from paceline.errors import UsageError
from paceline.layout import Layout, in_buckets
from paceline.server.admission import AdmissionRule
from paceline.server.state import export_state, import_state
from paceline.strategies import bucket_size
from paceline.strategies.base import (
    Context,
    Replica,
    StepOutcome,
    Strategy,
    Synchronizer,
    non_finite,
    option,
    require_choice,
)
from paceline.strategies.overlap import Overlap
from paceline.strategies.replica import is_skipped_by_scaler, require_no_closure, require_same_parameters

Algorithm = Literal["auto", "ring", "tree", "halving-doubling", "reduce-broadcast", "all-to-all"]
FIRST_BUCKET_BYTES = 1_000_000
"""At most, so that gradients begin to move early in backward."""
WHOLE_BYTES = 1 << 30
"""A bucket that holds all gradients of most models."""


@final
@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """Synchronous data parallelism without servers.

    Gradients lie in flat buckets, in reverse order of use. A bucket is averaged over all workers as soon as backward
    has filled it, while backward goes on (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2); every worker then
    takes the same optimizer step. Unlike there, a bucket carries one flag a parameter, so that a parameter that no
    worker used in a step keeps `grad=None`.

    >>> AllReduce(bucket_mb=1).num_servers()
    0
    """

    summary: ClassVar[str] = "gradients averaged among workers in buckets, during backward"

    algorithm: Algorithm = option(
        "auto",
        "auto: the fastest for the world at hand; to compare, over send and receive: ring, tree, halving-doubling, "
        "reduce-broadcast or all-to-all",
    )
    bucket_mb: float | Literal["auto"] = option(
        "auto", "size of a gradient bucket in MB; the first one is at most 1 MB; auto: as measured at the start"
    )

    def validate(self) -> None:
        require_choice("algorithm", self.algorithm, get_args(Algorithm))
        if self.bucket_mb != "auto" and not 0 < self.bucket_mb <= 1024:
            raise UsageError(f"bucket_mb must be auto, or above 0 and at most 1024, not {self.bucket_mb}")

    def check(self, *, num_workers: int) -> None:
        pass

    def is_lock_step(self) -> bool:
        return True

    def is_synchronous(self) -> bool:
        return True

    def num_servers(self) -> int:
        return 0

    def admission_rule(self, *, num_workers: int) -> AdmissionRule | None:
        return None

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        require_no_closure(replica.optimizer)
        if self.algorithm != "auto" and not context.collective.can_receive_first:
            # In every algorithm ranks receive from each other before they send: over NCCL they would hang.
            raise UsageError(f"algorithm={self.algorithm} is not for NCCL; use algorithm=auto, or --device cpu")
        return _AllReduceSynchronizer(self, context, replica)


@final
class _AllReduceSynchronizer(Synchronizer):
    def __init__(self, strategy: AllReduce, context: Context, replica: Replica) -> None:
        self._strategy = strategy
        self._rank = context.rank
        self._replica = replica
        self._collective = context.collective
        self._iteration = 0
        prepare = _exchange_for(strategy.algorithm, context)
        layout, buffer, self.facts = _laid_out(strategy, context, replica, lambda flat: prepare(flat)())
        self._overlap = Overlap(context.collective.timing, now_s=context.now_s)
        self._buckets = GradientBuckets(
            replica.parameters,
            layout,
            buffer,
            on_bucket=self.on_bucket,
            on_backward_end=self.finish_backward,
        )
        self._exchanges = [prepare(flat) for flat in self._buckets.flats]
        self._last_bucket = len(self._exchanges) - 1
        self._works: list[Work] = []
        self._culprit: str | None = None
        self._is_nonfinite = False
        self._stop = False
        self._is_exchanged = False  # whether what has been accumulated for the next step is averaged
        self._weight = 1.0

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self._collective.timing, self._overlap.timing)

    def set_weight(self, weight: float) -> None:
        if weight != self._weight and not self._is_exchanged:
            # What was accumulated without an exchange is to count with its own batch's weight, not with this one.
            for parameter in self._replica.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._weight / weight)
        self._weight = weight

    def set_synchronizing(self, on: bool) -> bool:
        if not on:
            self._is_exchanged = False
        before, self._buckets.is_synchronizing = self._buckets.is_synchronizing, on
        return before

    def on_bucket(self, bucket: int) -> None:
        """The bucket's gradients are final here: start to average them, and move the earlier ones on."""
        if bucket == 0:
            self._culprit = None
        buckets = self._buckets
        stop = bucket == self._last_bucket and self.stop_vote()
        buckets.fill_tail(bucket, stop=stop, nonfinite=False)
        culprit = None if self._strategy.nonfinite == "allow" else buckets.find_nonfinite(bucket)
        if culprit is not None:
            self._culprit = culprit
            buckets.fill_tail(bucket, stop=stop, nonfinite=True)
        if self._weight != 1.0:
            buckets.bodies[bucket].mul_(self._weight)
        self._works.append(self._exchanges[bucket]())
        if bucket == self._last_bucket:  # nothing is left to hide it
            return
        if self._strategy.algorithm == "auto":  # the others run when they are waited for, behind nothing
            self._overlap.begin()
        self._works = [work for work in self._works if not work.poll()]
        if not self._works:
            self._overlap.end()

    def finish_backward(self) -> None:
        """Wait for the averages; from here on `param.grad` is what the optimizer should see."""
        self._overlap.end()
        for work in self._works:
            work.wait()
        self._works.clear()
        flags = [self._buckets.read_tail(bucket) for bucket in range(len(self._buckets.flats))]
        self._is_nonfinite = any(nonfinite for nonfinite, _ in flags)
        self._stop = self._stop or any(stop for _, stop in flags)
        self._is_exchanged = True

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        require_same_parameters(self._replica)
        if not self._is_exchanged:
            # No backward pass of this step exchanged anything; the others may have: take part.
            self._buckets.flush()
            self.finish_backward()
        self._is_exchanged = False
        before = self._iteration
        if is_skipped_by_scaler(self._replica.optimizer):
            update()
        elif self._is_nonfinite and self._strategy.nonfinite == "raise":
            raise non_finite(rank=self._rank, step=self._iteration + 1, parameter=self._culprit)
        elif not self._is_nonfinite:
            update()
            self._iteration += 1
        stop, self._stop = self._stop, False
        return StepOutcome(self._iteration, stop=stop, staleness=0 if self._iteration > before else -1)

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        return StepOutcome(self._iteration)

    def refresh(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def optimizer_state(self) -> dict[str, Tensor]:
        return export_state(self._replica.optimizer, self._replica.parameters)

    def restore(self, state: dict[str, Tensor], *, iteration: int) -> None:
        import_state(self._replica.optimizer, self._replica.parameters, state)
        self._iteration = iteration

    def close(self) -> None:
        self._buckets.close()


def _laid_out(
    strategy: AllReduce, context: Context, replica: Replica, exchange: Callable[[Tensor], Work]
) -> tuple[Layout, Tensor, dict[str, float]]:
    """The buckets, their memory on the model's device, and what was measured to choose their size. Collective call."""
    if strategy.bucket_mb == "auto" and strategy.algorithm != "auto":
        # These run behind nothing: more buckets would only be more rounds.
        layout = in_buckets(replica.specs, bucket_bytes=WHOLE_BYTES, first_bucket_bytes=WHOLE_BYTES)
        return layout, _allocate(context, layout.num_bytes), {}
    largest_bytes = bucket_size.MIN_BYTES if strategy.bucket_mb == "auto" else int(strategy.bucket_mb * 1e6)
    layout = _in_buckets(replica, largest_bytes)
    buffer = _allocate(context, layout.num_bytes)  # larger buckets are fewer, and need less room for their flags
    is_small = layout.num_bytes < bucket_size.MIN_BYTES or len(layout.segments) == 1
    if strategy.bucket_mb != "auto" or is_small or context.size == 1:
        return layout, buffer, {}
    found = bucket_size.measured(context.collective, exchange, buffer, now_s=context.now_s)
    layout = _in_buckets(replica, found.num_bytes)
    facts = {
        "bucket_mb": found.num_bytes / 1e6,
        "num_buckets": len(layout.segments),
        "exchange_latency_s": found.latency_s,
        "exchange_bytes_per_s": found.bytes_per_s,
    }
    return layout, buffer[: layout.num_bytes], facts


def _in_buckets(replica: Replica, largest_bytes: int) -> Layout:
    first_bytes = min(largest_bytes, FIRST_BUCKET_BYTES)
    return in_buckets(replica.specs, bucket_bytes=largest_bytes, first_bucket_bytes=first_bytes)


def _allocate(context: Context, num_bytes: int) -> Tensor:
    """Memory that the collective moves fastest, on the model's device."""
    memory = context.collective.allocate(num_bytes)
    return memory if memory.device == context.device else torch.zeros_like(memory, device=context.device)


def _exchange_for(algorithm: Algorithm, context: Context) -> Callable[[Tensor], Callable[[], Work]]:
    """What prepares a bucket, and gives what averages it in every step."""
    collective: Collective = context.collective
    if algorithm == "auto":
        return lambda flat: collective.persistent_all_reduce(flat, op="mean")
    reduce = ALGORITHMS[algorithm]
    return lambda flat: lambda: AlgorithmWork(collective, reduce, flat, op="mean")
