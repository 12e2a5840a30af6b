"""Averages gradients anew among those who are left, when a worker dies or joins meanwhile."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.comm.base import Finished
from paceline.errors import PeerLost, UsageError
from paceline.layout import Layout
from paceline.messages import Raw, from_frames
from paceline.strategies.base import Recovery, Synchronizer
from paceline.strategies.bucketing import allocated, cut
from paceline.strategies.codec_choice import CodecChoice
from paceline.strategies.coding import Coding
from paceline.strategies.gradient_averaging import AveragingOptions, GradientAveraging
from paceline.strategies.regrouping import ResultHandedOn
from paceline.strategies.repeating import Repeating


@final
class RepeatedAveraging(GradientAveraging):
    """Keeps this worker's own gradients until all have the average.

    Args:
        coding: what encodes gradients at first.
        choice: of what encodes them among the workers that are there.
        recovery: knows the data and the other workers.
    """

    def __init__(
        self,
        options: AveragingOptions,
        owner: Synchronizer,
        layout: Layout,
        buffer: Tensor,
        coding: Coding | None,
        choice: CodecChoice,
        recovery: Recovery,
    ) -> None:
        super().__init__(options, owner, layout, buffer, coding)
        self._choice = choice
        self.repeating = Repeating(recovery)

    @property
    def is_update_complete(self) -> bool:  # type: ignore[override]
        return self.repeating.is_update_complete

    def set_weight(self, weight: float) -> None:
        self.weight = weight

    @property
    def _weights(self) -> Sequence[float]:  # type: ignore[override]
        is_asked = not self._options.aggregate.streams or self._owner.context.hostility is not None
        return self.repeating.recovery.weights if is_asked else ()

    def set_synchronizing(self, on: bool) -> bool:
        raise UsageError("--elastic repeats single batches: worker.no_sync() cannot be had with it so far")

    def begin_evaluation(self) -> None:
        raise UsageError("--elastic cannot repeat steps whose optimizer calls a closure; use another optimizer")

    def rejoin(self, facts: Mapping[str, float | str] | None) -> None:
        """The owner's context has changed. `facts`: the others', where this worker joins them."""
        self.repeating.lost = None
        context = self._owner.context
        if facts is not None and "bucket_mb" in facts:
            self._layout = cut(self._owner.replica, round(float(facts["bucket_mb"]) * 1e6))
        self._renew_buckets(allocated(context, self._layout.num_bytes))
        before = self._exchange
        self._exchange = self._exchanging(self._choice.rejoin(context), before.timing)
        self._exchange.carry_on(before)

    def _renew_buckets(self, buffer: Tensor) -> None:
        self._works.clear()
        self._buckets.close()
        self._buckets = self._in_buckets(buffer)

    def _send(self, bucket: int, *, is_last: bool) -> None:
        if bucket == 0 and self._num_exchanges > 1:
            raise UsageError("--elastic repeats single backward passes: call backward() once a step, or leave it out")
        self.repeating.keep(bucket, self._buckets)
        if self.repeating.lost is not None:
            return
        try:
            super()._send(bucket, is_last=is_last)
        except PeerLost as lost:
            self.repeating.lost = lost

    def _finish_backward(self) -> None:
        """Average until no worker dies in it or joins, each time among those who are there."""
        repeating = self.repeating
        while True:
            try:
                if repeating.lost is None:
                    super()._finish_backward()
                    self._choice.look()
                    break
                self._begin_anew()
            except PeerLost as lost:
                repeating.lost = lost
            except ResultHandedOn as handed:
                self._take_over(handed.frames)
                repeating.lost = PeerLost("the others have gone on a step further, and wait for this worker")
                break
        if not self._owner.context.collective.completes_alike:
            repeating.keep_result(self._buckets)
        if not self._options.aggregate.streams:
            repeating.weigh_joint(self._buckets)
        self.is_nonfinite = repeating.commit(self._buckets, is_nonfinite=self.is_nonfinite)

    def _agree(self) -> None:
        """Over messages one worker may have the average, and another wait for what the dead was to hand on to it: then
        nobody takes it. All have come to the end of theirs where one has the result of this."""
        is_taken_over = self.repeating.lost is not None
        if not (self._exchange.completes_alike or is_taken_over):
            self._owner.context.collective.all_reduce(torch.zeros(1), op="max").wait()

    def _begin_anew(self) -> None:
        """Average anew among those who are left, with this worker's own gradients."""
        recovery = self.repeating.recovery
        self._owner.rejoin(recovery.regroup())
        self.repeating.put_back(self._buckets)
        self.weight = recovery.weight
        self._num_exchanges, self._culprit, self._stop = 0, None, False
        for bucket in range(len(self._buckets.buckets)):
            self._buckets.adopt(bucket)
            self._on_bucket(bucket)

    def _take_over(self, frames: Sequence[Raw]) -> None:
        """The others' averages become this worker's."""
        # In other memory: what was under way may still write to the old one.
        self._renew_buckets(torch.zeros(self._layout.num_bytes, dtype=torch.uint8))
        self.repeating.put_back(self._buckets)
        for bucket in range(len(self._buckets.buckets)):
            self._buckets.adopt(bucket)
            self._buckets.fill_flags(bucket, stop=False, nonfinite=False)
        from_frames(frames, [bucket.flat for bucket in self._buckets.buckets])
        self._works = [Finished()] * len(self._buckets.buckets)
        self._take_averages()
