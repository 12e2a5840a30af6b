"""Steps of a loop whose model is not torch's: the script says where each begins."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from paceline.errors import UsageError
from paceline.records import StepRecord
from paceline.training import own_options
from paceline.training.worker_run import WorkerRun

_GOES_ON = "run it again with another --out; it goes on where it loads what it has saved"


@final
class OwnLoop:
    """Records the steps of a loop that is not torch's, and tells the script when the run's budget is used up."""

    def __init__(self, run: WorkerRun, *, is_resumed: bool) -> None:
        self._run, self._is_resumed = run, is_resumed
        self._has_begun = False
        self._samples: int | None = None  # of the step that is under way
        self._began_s = self._exchanged_s = 0.0

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """What is done inside is no computing."""
        began_s = self._run.clock.now_s
        try:
            yield
        finally:
            self._exchanged_s += self._run.clock.now_s - began_s

    def begin(self, samples: int) -> bool:
        """As `Worker.begin_step`."""
        num_samples = _checked(samples)
        self._require_own()
        with self.exchanging():
            is_over = self._agrees_to_end()
        self._record()
        self._run.has_ended = is_over
        if is_over:
            self._run.clock.pause()
            return False
        if not self._has_begun:
            self._has_begun = True
            if not self._run.goes_on_by:
                self._run.tell("saves_itself", {"how": _GOES_ON})
            self._run.tell("training")
        self._samples, self._began_s, self._exchanged_s = num_samples, self._run.clock.now_s, 0.0
        self._run.clock.resume()
        return True

    def end(self) -> None:
        """The step that is under way ends here, if there is one, and so does training until the next begins."""
        if self._samples is not None:
            self._run.clock.pause()
            self._record()

    def _agrees_to_end(self) -> bool:
        """Whether some worker wants all to end. The first call has all begin together. Collective call."""
        run = self._run
        num_steps = run.steps + (self._samples is not None)
        is_used_up = run.config.max_steps is not None and num_steps >= run.config.max_steps
        says = torch.tensor(float(run.has_ended or is_used_up or run.wants_stop()))
        run.context.collective.all_reduce(says, op="max").wait()
        return bool(says)

    def _record(self) -> None:
        if self._samples is None:
            return
        run, (samples, self._samples) = self._run, (self._samples, None)
        now_s = run.clock.now_s
        run.steps, run.samples = run.steps + 1, run.samples + samples
        run.iteration = run.steps
        compute_s = now_s - self._began_s - self._exchanged_s
        step = (run.context.rank, run.steps, run.iteration, now_s, samples, compute_s, self._exchanged_s)
        run.reporter.emit(StepRecord(*step, waiting_s=0.0, moved_bytes=0, staleness=0, hidden_s=0.0))

    def _require_own(self) -> None:
        if self._run.is_prepared:
            raise UsageError(
                "worker.begin_step is for loops without worker.prepare, whose optimizer counts steps itself"
            )
        own_options.refuse(
            own_options.MODEL,
            self._run.config,
            is_resumed=self._is_resumed,
            why="needs a model that worker.prepare was given; a loop of worker.begin_step evaluates and saves by "
            "itself: leave it out",
        )


def _checked(samples: object) -> int:
    try:
        found = operator.index(samples)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if found < 0:
        raise UsageError(f"worker.begin_step({samples!r}): samples must be a whole number, 0 or more")
    return found
