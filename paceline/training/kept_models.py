"""Models that rank 0 keeps while workers train, to be judged when all pause anyway, or at the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from torch import Tensor

from paceline.interval import Count
from paceline.training import snapshot
from paceline.training.worker_run import WorkerRun

MOST_BYTES = 512 * 2**20
"""Memory that kept models take, unless one alone takes more."""


@final
@dataclass(frozen=True)
class KeptModel:
    at: Count
    weights: dict[str, Tensor]


@final
class KeptModels:
    """Takes copies of this worker's model, which after each of its steps is that of the servers (the trait
    `shows_model`). Nothing is sent for one, and nobody waits: other workers notice no more than that this one took so
    long for its step. Buffers are this worker's own.

    Samples and batches are counted by this worker's: every iteration is one gradient, of as many samples as its own
    are on average.
    """

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._kept: list[KeptModel] = []
        self._bytes = self._num = self._left_out = 0
        self._took_s = 0.0
        self._since: Count | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, at: Count) -> None:
        """The model has been judged, or was saved, when the run was this far."""
        self._since = at

    @property
    def is_due(self) -> bool:
        """Whether the model is to be judged as it is now."""
        every = self._run.config.eval_every
        return every is not None and self._since is not None and every.has_come(self._since, self._now())

    def keep_if_due(self) -> None:
        """Call it between two steps."""
        if not self.is_due:
            return
        self._since = now = self._now()
        if self._bytes >= MOST_BYTES:
            self._left_out += 1
            return
        began_s = self._run.context.pacing.now_s()
        weights = snapshot.weights_of(self._run.prepared.replica.model)
        self._took_s += self._run.context.pacing.now_s() - began_s
        self._kept.append(KeptModel(now, weights))
        self._bytes += sum(tensor.nbytes for tensor in weights.values())
        self._num += 1

    def taken(self, *, before: int) -> Iterator[KeptModel]:
        """The kept models of iterations before that one, in order; none is kept any more."""
        kept, self._kept, self._bytes = self._kept, [], 0
        return (model for model in kept if model.at.iterations < before)

    def drop(self) -> None:
        """Drop all, which nobody is to judge."""
        self._left_out += len(self._kept)
        self._kept, self._bytes = [], 0

    def leave_out(self) -> None:
        """One that was taken could not be judged."""
        self._left_out += 1

    def tell(self) -> None:
        """What they cost, at the end of the run."""
        if self._num or self._left_out:
            details = {"kept": self._num, "left_out": self._left_out, "took_s": self._took_s}
            self._run.tell("models_kept", details)

    def _now(self) -> Count:
        run = self._run
        samples = round(run.iteration * run.samples / run.steps) if run.steps else 0
        return Count(run.iteration, samples, run.iteration, run.clock.now_s)
