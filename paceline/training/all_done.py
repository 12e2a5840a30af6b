"""What all workers together have trained on, where each knows what all were dealt."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from paceline.checkpoint import WorkerState
from paceline.elastic import Deal
from paceline.training import snapshot
from paceline.training.worker_run import WorkerRun


@final
class AllDone:
    """Samples and batches, those of workers that have died among them. The run's first worker says them for all."""

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self.now = (0, 0)
        self._at_update = (0, 0)

    def add(self, deals: Iterable[Deal]) -> None:
        """All parts of these are done."""
        parts = [part for deal in deals for part in deal.parts]
        self.count(sum(map(len, parts)), sum(map(bool, parts)))

    def count(self, samples: int, batches: int) -> None:
        """So many more are done."""
        self.now = self.now[0] + samples, self.now[1] + batches

    def complete(self) -> None:
        """An update has all its samples."""
        self._at_update = self.now

    def take_up(self, counts: Sequence[int]) -> None:
        """Another worker has counted so far."""
        samples, batches = counts
        self.now = self._at_update = samples, batches

    @property
    def said(self) -> tuple[int, int]:
        """As `Surviving.counts`."""
        return self.now if self._run.context.is_first else (0, 0)

    def for_later(self, worker: WorkerState) -> WorkerState:
        """What a checkpoint holds of this worker: the first one's says what there was up to the last update."""
        samples, steps = self._at_update if self._run.context.is_first else (0, 0)
        return replace(worker, samples=samples, steps=steps)

    def go_on_from(self, workers: Sequence[WorkerState], *, iteration: int) -> list[WorkerState]:
        """What these had trained on counts, too, with any number of workers."""
        workers, size = snapshot.beside_the_first(workers), self._run.context.size
        self.take_up([sum(each.samples for each in workers), sum(each.steps for each in workers)])
        return [replace(each, steps=iteration) for each in [*workers, *(workers[0],) * size][:size]]
