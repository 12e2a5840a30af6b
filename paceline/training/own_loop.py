"""Steps of a loop whose model is not torch's: the script says where each begins."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from paceline.errors import UsageError
from paceline.records import StepRecord
from paceline.training.worker_run import WorkerRun


@final
class OwnLoop:
    """Records them, and tells the script when the run's budget is used up."""

    def __init__(self, run: WorkerRun, *, is_resumed: bool) -> None:
        self._run, self._is_resumed = run, is_resumed
        self._samples: int | None = None  # of the step that is under way
        self._began_s = self._exchanged_s = 0.0

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """What is done inside is no computing."""
        began_s = self._run.clock.now_s
        yield
        self._exchanged_s += self._run.clock.now_s - began_s

    def begin(self, samples: int) -> bool:
        """As `Worker.begin_step`."""
        run = self._run
        if run.is_prepared:
            raise UsageError(
                "worker.begin_step is for loops without worker.prepare, whose optimizer counts steps itself"
            )
        if not run.clock.is_running and not run.has_ended:
            self._start()
        num_steps = run.steps + (self._samples is not None)
        wants_end = num_steps >= (run.config.max_steps or num_steps + 1) or run.wants_stop()
        says = torch.tensor(float(wants_end))
        with self.exchanging():
            run.context.collective.all_reduce(says, op="max").wait()
        self.end()
        if says:
            run.has_ended = True
            run.clock.pause()
            return False
        self._samples, self._began_s, self._exchanged_s = samples, run.clock.now_s, 0.0
        return True

    def end(self) -> None:
        """Record the step that is under way, if there is one."""
        if self._samples is None:
            return
        run, (samples, self._samples) = self._run, (self._samples, None)
        now_s = run.clock.now_s
        run.steps, run.samples = run.steps + 1, run.samples + samples
        run.iteration = run.steps
        compute_s = now_s - self._began_s - self._exchanged_s
        step = (run.context.rank, run.steps, run.iteration, now_s, samples, compute_s, self._exchanged_s)
        run.reporter.emit(StepRecord(*step, waiting_s=0.0, moved_bytes=0, staleness=0, hidden_s=0.0))

    def _start(self) -> None:
        run, config = self._run, self._run.config
        for option, is_given in {
            "--target": config.target is not None,
            "--eval-every": config.eval_every is not None,
            "--keep-best": config.keep_best is not None,
            "--checkpoint-every": config.checkpoint_every is not None,
            "--resume": self._is_resumed,
            "--elastic": config.elastic is not None,
        }.items():
            if is_given:
                raise UsageError(
                    f"{option} needs a model that worker.prepare was given; a loop of worker.begin_step evaluates and "
                    "saves by itself: leave it out"
                )
        run.context.collective.barrier()
        run.clock.resume()
        run.tell("training")
