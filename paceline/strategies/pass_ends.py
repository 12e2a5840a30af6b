"""Where backward passes end in a run of several optimizers, of which some may have gradients on one rank alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from paceline.buckets import GradientBuckets
from paceline.comm.base import Collective
from paceline.strategies.meeting import gathered


class Passes(NamedTuple):
    """The backward passes that bring one optimizer's gradients."""

    buckets: GradientBuckets
    are_of_rows: bool
    """All its parameters move by rows, of which a rank's batch may have none."""
    exchange: Callable[[], bool]
    """Whether all ranks exchange gradients when one ends."""


@final
class PassEnds:
    """Has ranks tell, when a pass has ended and all other gradients are exchanged, which optimizers of rows it has
    reached. All ranks then exchange the gradients of each optimizer that a pass has reached on any of them, in the
    optimizers' order: a rank that exchanged them as they come would meet another one's exchange of something else.

    Args:
        passes: of all of the run's optimizers.
    """

    def __init__(self, collective: Collective, passes: Sequence[Passes]) -> None:
        self._collective, self._all = collective, [each.buckets for each in passes]
        self._of_rows = [each for each in passes if each.are_of_rows]
        if not self._of_rows or collective.size == 1:
            return
        for buckets in self._all:
            buckets.on_end = self._end
        for each in self._of_rows:
            each.buckets.waits = True

    def _end(self) -> None:
        """The pass has ended for one of the optimizers. For the last of them it has ended."""
        if any(buckets.in_backward for buckets in self._all):
            return
        joint = [each for each in self._of_rows if each.exchange()]
        reached = [each.buckets.is_reached for each in joint]
        if joint:
            told = gathered(self._collective, "the end of a backward pass", reached)
            reached = [any(theirs) for theirs in zip(*told, strict=True)]
        local = [each for each in self._of_rows if each not in joint]
        due = [*zip(joint, reached, strict=True), *((each, each.buckets.is_reached) for each in local)]
        for each, is_due in due:
            if is_due:
                each.buckets.finish()
