"""Averages a worker's gradients with all others', while its backward pass goes on."""

from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

from torch import Tensor

from paceline.aggregate import Aggregator
from paceline.buckets import MOST_RANKS, GradientBuckets, OutOfTurn
from paceline.comm.base import Timing, Work
from paceline.errors import NonFiniteGradient, UsageError
from paceline.layout import Layout
from paceline.strategies.base import NonFinitePolicy, Synchronizer, non_finite
from paceline.strategies.coding import Coding
from paceline.strategies.exchange import Exchange
from paceline.strategies.meeting import gathered
from paceline.strategies.overlap import Overlap
from paceline.strategies.own_state import OwnState
from paceline.strategies.pass_ends import Passes
from paceline.strategies.progress import Progress, require_same
from paceline.strategies.sparse_gradients import SparseGradients

_APART = 5  # what turns of two optimizers differ by


class AveragingOptions(Protocol):
    """What a strategy says of it."""

    @property
    def algorithm(self) -> str: ...
    @property
    def aggregate(self) -> Aggregator: ...
    @property
    def behind_backward(self) -> bool: ...
    @property
    def nonfinite(self) -> NonFinitePolicy: ...


class GradientAveraging:
    """Starts to average each bucket of gradients once backward has filled it; at the end of backward, `param.grad` is
    what the optimizer should see.

    Args:
        owner: the synchronizer whose optimizer steps with these gradients.
        layout: of the buckets.
        buffer: their memory.
        coding: what encodes gradients; none: they travel as they are.
    """

    is_update_complete = True
    """Whether the optimizer is to step with what has been averaged; otherwise more is to come."""
    _weights: Sequence[float] = ()
    """Of all workers' gradients, where some may count nothing."""

    def __init__(
        self,
        options: AveragingOptions,
        owner: Synchronizer,
        layout: Layout,
        buffer: Tensor,
        coding: Coding | None,
    ) -> None:
        self.is_nonfinite = False
        """Whether a gradient of this step is not finite, and that matters."""
        self.is_exchanged = False
        """Whether what has been accumulated for the next step is averaged."""
        self.weight = 1.0
        """The weight of this worker's gradients."""
        self._options, self._owner = options, owner
        self._layout = layout
        self._rows = SparseGradients(owner.replica, whose=lambda: (owner.number, owner.title))
        self._has_rows = bool(owner.replica.by_rows)
        self._buckets = self._in_buckets(buffer)
        self._exchange = self._exchanging(coding, Timing())
        self._overlap = Overlap(owner.context.collective.timing, now_s=owner.context.pacing.now_s)
        self._works: list[Work] = []
        self._culprit: tuple[int, str] | None = None  # a rank, and a parameter whose gradient was not finite there
        self._stop = False
        self._num_exchanges = 0  # since the last step
        self._turn = 0  # what is the same on every rank in each of them

    @property
    def timings(self) -> tuple[Timing, ...]:
        return self._overlap.timing, self._exchange.timing

    @property
    def passes(self) -> Passes:
        return Passes(self._buckets, self._owner.replica.is_of_rows, lambda: True)

    @property
    def owes(self) -> bool:
        """As `Synchronizer.owes`."""
        return self._exchange.owes

    def set_weight(self, weight: float) -> None:
        if not self._options.aggregate.streams:
            return
        if weight != self.weight and not self.is_exchanged:
            # What was accumulated without an exchange is to count with its own batch's weight, not with this one.
            for parameter in self._owner.replica.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.weight / weight)
        self.weight = weight

    def set_synchronizing(self, on: bool) -> bool:
        if not on:
            self.is_exchanged = False
        before, self._buckets.is_synchronizing = self._buckets.is_synchronizing, on
        return before

    def begin_evaluation(self) -> None:
        """The optimizer is about to call the script's closure, whose backward pass is of this step."""
        self.is_exchanged = False

    def require_exchange(self) -> None:
        """Where no backward pass of this step exchanged anything, others' may have: take part."""
        if not self.is_exchanged:
            self._buckets.flush()
            self._finish_backward()

    def end_step(self) -> bool:
        """The next backward pass is the first of another step. Returns whether all are to stop."""
        self.is_exchanged = self.is_nonfinite = False
        self._num_exchanges = 0
        stop, self._stop = self._stop, False
        return stop

    def non_finite(self) -> NonFiniteGradient:
        """The error that names the gradient."""
        owner = self._owner
        rank, parameter = self._culprit or (owner.context.rank, None)
        return non_finite(rank=rank, step=owner.iteration + 1, parameter=parameter)

    def code(self, coding: Coding) -> None:
        """Encode gradients from the next step on."""
        self._exchange = self._exchanging(coding, self._exchange.timing)

    def own_state(self) -> dict[str, OwnState]:
        return self._exchange.own_state()

    def restore(self, own: Mapping[str, Tensor]) -> None:
        self._exchange.restore(own)

    def close(self) -> None:
        self._buckets.close()

    def _in_buckets(self, buffer: Tensor) -> GradientBuckets:
        return GradientBuckets(
            self._owner.replica.parameters,
            self._layout,
            buffer,
            apart=self._owner.replica.by_rows,
            on_bucket=self._on_bucket,
            on_backward_end=self._finish_backward,
        )

    def _exchanging(self, coding: Coding | None, timing: Timing) -> Exchange:
        exchange = Exchange(
            self._owner.context.collective,
            self._buckets.buckets,
            algorithm=self._options.algorithm,
            coding=coding,
            layout=self._layout,
            timing=timing,
            aggregator=self._options.aggregate,
            senders=self._owner.context.membership.ranks,
        )
        self._looks_first = self._options.nonfinite != "allow" and not exchange.is_watched
        self._behind_backward = self._options.behind_backward and coding is None
        return exchange

    def _on_bucket(self, bucket: int) -> None:
        """The bucket's gradients are final here."""
        owner, is_last = self._owner, bucket == len(self._buckets.buckets) - 1
        if bucket == 0:
            self._culprit = None
            self._num_exchanges += 1
            if len(owner.context.membership.ranks) <= MOST_RANKS:
                num_steps, num_batches = owner.progress()
                self._turn = self._num_exchanges + num_batches - num_steps + _APART * owner.number
        culprit = self._buckets.find_nonfinite(bucket) if self._looks_first else None
        if culprit is None and is_last and self._has_rows and self._options.nonfinite != "allow":
            culprit = self._rows.find_nonfinite()
        if culprit is not None:
            self._culprit = (owner.context.rank, culprit)
        stop = is_last and owner.stop_vote()
        self._buckets.fill_flags(bucket, stop=stop, nonfinite=culprit is not None, turn=self._turn)
        self._send(bucket, is_last=is_last)

    def _send(self, bucket: int, *, is_last: bool) -> None:
        """Start to average the bucket, and move the earlier ones on."""
        owner = self._owner
        if self.weight != 1.0 and self._options.aggregate.streams:
            self._buckets.buckets[bucket].values.mul_(self.weight)
        if owner.context.hostility is not None:  # an attack looks at all gradients
            return
        self._works.append(self._exchange.start(bucket, step=owner.iteration, weights=self._weights))
        if is_last:  # nothing is left to hide it
            return
        if self._behind_backward:
            self._overlap.begin()
        under_way = [work for work in self._works if not work.poll()]
        if not under_way:
            self._overlap.end()

    def _finish_backward(self) -> None:
        """Wait for the averages; from here on `param.grad` is what the optimizer should see."""
        owner = self._owner
        if owner.context.hostility is not None:
            self._overlap.end()
            weights, step = self._weights, owner.iteration
            owner.context.corrupt(self._buckets.views, step, weights=weights)
            buckets = range(len(self._buckets.buckets))
            self._works = [self._exchange.start(bucket, step=step, weights=weights) for bucket in buckets]
        self._take_averages()

    def _take_averages(self) -> None:
        """Wait for what is under way."""
        owner = self._owner
        self._overlap.end()
        is_any_nonfinite = False
        matters = self._options.nonfinite != "allow"
        for bucket, work in enumerate(self._works):
            work.wait()
            try:
                is_nonfinite, stop = self._buckets.read_flags(bucket)
            except OutOfTurn:
                self._raise_disagreement()
            if matters and self._culprit is None and (found := work.nonfinite) is not None:
                rank = owner.context.membership.ranks[found.rank]
                self._culprit = (rank, self._buckets.name_at(bucket, found.element))
            is_any_nonfinite = is_any_nonfinite or is_nonfinite or self._culprit is not None
            self._stop = self._stop or stop
        if owner.context.recovery is not None:
            self._agree()
        self.is_nonfinite = is_any_nonfinite and matters
        # What is not finite is applied by nobody, or was asked for; kept, it would come again in every later step.
        if self._exchange.is_coded:
            self._exchange.settle(is_applied=not is_any_nonfinite)
        self._works.clear()
        if self._has_rows:
            self._rows.average(owner.context.collective, weight=self.weight)
        self.is_exchanged = True

    def _agree(self) -> None:
        """This worker has all averages, and nothing follows from them yet."""

    def _raise_disagreement(self) -> NoReturn:
        """Name the ranks whose exchanges met out of turn. Collective call."""
        owner = self._owner
        place = f"a backward pass of {owner.title!r}" if owner.title else "a backward pass"
        everyone = gathered(owner.context.collective, place, [self._num_exchanges, *owner.progress()])
        nums = [num_exchanges for num_exchanges, *_ in everyone]
        if len(set(nums)) == 1:
            require_same([Progress(*progress) for _, *progress in everyone])
        theirs = ", ".join(f"rank {rank} {num}" for rank, num in enumerate(nums))
        raise UsageError(
            f"step {owner.iteration + 1}: backward passes since the last optimizer.step(): {theirs}; every rank must "
            "call backward() and step() as often as the others (with worker.no_sync() backward passes only accumulate)"
        )
