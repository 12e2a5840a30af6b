"""Has a script that reads or changes gradients before its step see the mean of all workers' gradients."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

from torch import Tensor, nn

from paceline.aggregate import Aggregator
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.strategies.digests import digest
from paceline.strategies.gradient_reads import GradientReads
from paceline.strategies.looks import Window, version_of
from paceline.strategies.sparse_gradients import SparseGradients

Mode = Literal["auto", "always", "never"]
_WINDOW_BYTES = 256
_MOST_LOOKS = 8
"""How many steps of several backward passes are looked at: a script that accumulates in every step is not to pay for
it."""

_NO_MEAN = (
    "under ps-bsp with backup_workers or --elastic there is no mean gradient to change; use --option combine=never to "
    "change each worker's own"
)
_NO_MIX = (
    "a mean of all workers' gradients would hide what aggregate compares; use --option combine=never to change each "
    "worker's own"
)
_NO_TRIAL = (
    "with a codec a first step that is averaged would differ from the others; use --option combine=always so that it "
    "sees the mean of all workers' gradients, or combine=never to change each worker's own"
)


def obstacle_to_a_mean(*, is_partial: bool, aggregator: Aggregator, is_coded: bool) -> str | None:
    """Why workers cannot try whether the script looks at a mean, with what to do instead.

    Args:
        is_partial: not every worker's gradient counts.
        aggregator: of the servers.
        is_coded: what is pushed goes through a codec.
    """
    if is_partial:
        return _NO_MEAN
    if not aggregator.streams:
        return _NO_MIX
    return _NO_TRIAL if is_coded else None


@final
class Combining:
    """Averages gradients among workers after backward, if the script is to see the mean.

    With `auto` the first step shows whether the script reads or changes gradients between backward and step, as a norm
    that it weighs its losses by, clipping and unscaling do; workers then combine from there on.

    Args:
        flats: all gradients that lie in flat memory.
        rows: the others.
        parameters: that they are of.
        mode: whether to combine.
        obstacle: why the first step's gradients are not averaged on trial, and what to ask for instead, for the error
            of scripts that change gradients; none: they are.
        find_nonfinite: the name of a parameter whose gradient is not finite.
        before_leaving: called before gradients are averaged.
        tell: records an event of the run.
    """

    def __init__(
        self,
        collective: Collective,
        flats: Sequence[Tensor],
        *,
        rows: SparseGradients | None = None,
        mode: Mode,
        parameters: Sequence[nn.Parameter] = (),
        obstacle: str | None = None,
        find_nonfinite: Callable[[], str | None],
        before_leaving: Callable[[], None] = lambda: None,
        tell: Callable[[str, Mapping[str, Any]], None] = lambda event, details: None,
    ) -> None:
        self._collective, self._flats, self._find_nonfinite = collective, flats, find_nonfinite
        self._rows = rows or SparseGradients()
        self._obstacle, self._before_leaving, self._tell = obstacle, before_leaving, tell
        self._is_undecided = mode == "auto" and collective.size > 1
        self._averages = mode == "always" or (self._is_undecided and obstacle is None)
        self._refuses_change = mode == "auto" and collective.size > 1
        watched = [flat for flat in flats if flat.is_cpu] if self._refuses_change else []
        self._windows = [Window(flat, _WINDOW_BYTES) for flat in watched]
        self._reads = GradientReads(parameters)
        self._has_told = False
        self._num_passes = 0  # since the last step
        self._num_looks = _MOST_LOOKS
        self._read_at = ""  # where the script has read gradients of this step
        self.looks = True
        """Whether what the windows show is compared in this step."""
        self._seen: list[object] | None = None  # what `_versions` gave after backward
        self._looks_closely = False
        self._digest = ""  # of the gradients after backward, in a step that is looked at closely
        self.is_combined = False
        """This step's gradients are the workers' mean by now."""
        self.culprit: str | None = None
        """The parameter of this worker whose gradient was not finite before it was averaged."""

    @property
    def averages(self) -> bool:
        """Whether a backward pass ends with an exchange, for which all workers meet."""
        return self._averages

    def after_backward(self, weight: float) -> None:
        """A backward pass that synchronizes has ended, of a batch with this weight."""
        if self._averages:
            self.culprit = self._find_nonfinite()
            for flat in self._flats:
                if weight != 1.0:
                    flat.mul_(weight)
            self._before_leaving()
            for flat in self._flats:
                self._collective.all_reduce(flat, op="mean").wait()
            self._rows.average(self._collective, weight=weight)
            self.is_combined = True
        self._seen = self._versions()
        if self._is_undecided or self._looks_closely:
            self._digest = digest(self._flats)
            self._reads.begin()
        self._num_passes += 1
        if self._num_passes == 2 and self._num_looks and self._refuses_change and not self._averages:
            self._num_looks -= 1  # it may compute gradients to look at them, and no step
            self._reads.begin()

    def script_is_done(self) -> None:
        """The script steps: what reads gradients from here on is no script."""
        self._read_at = self._reads.end()

    def look_closely(self) -> None:
        """At the next step, look also for changes through `.data` that a few bytes do not show."""
        self._looks_closely = self._refuses_change

    def only_accumulates(self) -> None:
        """The next backward passes exchange nothing."""
        self._seen = None

    def rescale(self, factor: float) -> None:
        """What was accumulated without an exchange is to count with its own batch's weight, not with the next one's."""
        if self._averages and self._seen is not None:
            return
        is_changed_by_script = self._seen != self._versions()
        self._looks_closely = False
        for flat in self._flats:
            flat.mul_(factor)
        self._rows.rescale(factor)
        if self._seen is not None and not is_changed_by_script:
            self._seen = self._versions()

    def before_step(self, weight: float, *, step: int, is_scaled: bool) -> None:
        """Decide after the first step; average where every backward pass of this step only accumulated.

        Args:
            is_scaled: the optimizer itself is about to unscale the gradients.

        Raises:
            UsageError: the script changes gradients, and there is no mean that it could change.
        """
        if self._is_undecided:
            self._decide(is_scaled=is_scaled)
        elif self._refuses_change and not self._averages and self._is_changed(closely=self._looks_closely):
            raise UsageError(
                f"step {step}: the script changed gradients between backward() and step() on rank "
                f"{self._collective.rank}, which it did not do in its first step; use --option combine=always so that "
                "it sees the mean of all workers' gradients"
            )
        elif self._read_at and not self._averages and self._obstacle is None and not self._has_told:
            self._has_told = True
            warnings.warn(
                f"step {step}: the script reads gradients between backward() and step() on rank "
                f"{self._collective.rank} ({self._read_at}), which it did not do in its first step: they are this "
                "worker's own; use --option combine=always so that it sees the mean of all workers' gradients",
                stacklevel=4,
            )
        if self._averages and self._seen is None:
            self.after_backward(weight)
            self._reads.end()

    def take(self) -> bool:
        """The step begins: whether its gradients are the workers' mean. The next step starts anew."""
        is_combined, self.is_combined, self._seen = self.is_combined, False, None
        self._num_passes = 0
        self._looks_closely = False
        if self.looks:
            for window in self._windows:
                window.move_on()
        return is_combined

    def _decide(self, *, is_scaled: bool) -> None:
        """Keep averaging if the script read or changed its first step's gradients on any worker, or is about to."""
        changed = self._seen is not None and (is_scaled or self._is_changed(closely=True))
        self._is_undecided = False
        if self._obstacle is None:
            own = "changes gradients" if changed else f"reads gradients ({self._read_at})" if self._read_at else ""
            everyone = self._collective.all_gather_object(own)
            self._averages = any(everyone)
            if self._averages:
                rank = next(rank for rank, why in enumerate(everyone) if why)
                why = f"in its first step the script {everyone[rank]} between backward() and step() on rank {rank}"
                self._tell("combining", {"why": why, "leave_out_by": "--option combine=never"})
        elif changed:  # alone, since workers need not be at the same step
            raise UsageError(f"the script changes gradients between backward() and step(), and {self._obstacle}")

    def _is_changed(self, *, closely: bool) -> bool:
        if self._seen is None:
            return False
        return self._seen != self._versions() or (closely and self._digest != digest(self._flats))

    def _versions(self) -> list[object]:
        """What changes with each change of a gradient in place: counters, which views share with the tensor they are a
        view of, and some bytes, since torch does not count changes through `.data`."""
        versions = [*map(version_of, self._flats), *self._rows.versions()]
        return [*versions, *(window.read() for window in self._windows)] if self.looks else versions
