"""What all workers together have trained on, where each knows what all were dealt."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from paceline.checkpoint import WorkerState
from paceline.elastic import Deal
from paceline.training import snapshot


@final
class AllDone:
    """Samples and batches, those of workers that have died among them."""

    def __init__(self) -> None:
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

    def said_by(self, *, is_first: bool) -> tuple[int, int]:
        """The first worker says it for all."""
        return self.now if is_first else (0, 0)

    def for_later(self, worker: WorkerState, *, is_first: bool) -> WorkerState:
        """What a checkpoint holds of this worker. The first one says what all have trained on up to the last update."""
        samples, steps = self._at_update if is_first else (0, 0)
        return replace(worker, samples=samples, steps=steps)

    def go_on_from(self, workers: Sequence[WorkerState], *, size: int, iteration: int) -> list[WorkerState]:
        """What these had trained on counts, too, with any number of workers."""
        workers = snapshot.beside_the_first(workers)
        self.take_up([sum(each.samples for each in workers), sum(each.steps for each in workers)])
        return [replace(each, steps=iteration) for each in [*workers, *(workers[0],) * size][:size]]
