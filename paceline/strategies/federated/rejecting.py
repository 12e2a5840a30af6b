"""Which of a round's clients are left out, since the model gets worse with what they changed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor, nn

from paceline.aggregate import Contribution, Validation
from paceline.config import rises
from paceline.errors import UsageError, unknown
from paceline.strategies.base import Context

ModelWith = Callable[[Sequence[Tensor]], AbstractContextManager[nn.Module]]
"""The server's model, less these changes of what clients share; with none, as it is."""


@final
class Rejecting:
    """The first worker judges, and all learn what it found: evaluations may differ from worker to worker.

    Args:
        model_with: a model to judge, in this worker's place of it.
    """

    def __init__(self, validation: Validation, context: Context, model_with: ModelWith) -> None:
        self._validation, self._context, self._model_with = validation, context, model_with

    def judge_among(self, context: Context) -> None:
        """Others are there now."""
        self._context = context

    def require_judge(self) -> None:
        """Collective call. Raises UsageError, on all workers, where there is no evaluation that gives the metric."""
        self._judged([])

    def kept(self, contributions: Sequence[Contribution], round_number: int) -> list[Contribution]:
        """The contributions that count. Collective call. Raises as `require_judge`."""
        validation = self._validation
        before, *after = self._judged(contributions)
        rejected = validation.rejects(before, after, rises=rises(validation.metric))
        found = zip(contributions, after, rejected, strict=True)
        worse = {f"client {each.sender}": metric for each, metric, is_out in found if is_out}
        if worse:
            self._tell(worse, before, round_number + 1)
        return [each for each, is_out in zip(contributions, rejected, strict=True) if not is_out]

    def _tell(self, worse: Mapping[str, float], before: float, number: int) -> None:
        name, context = self._validation.metric, self._context
        if context.tell is not None:
            context.tell("rejected", {"round": number, "metric": name, "before": before, "with": dict(worse)})
        if context.clients is not None:
            each = ", ".join(f"{who} ({metric:.4g})" for who, metric in worse.items())
            context.clients.tell(f"round {number}: {name} was {before:.4g}; left out, as it would be worse: {each}")

    def _judged(self, contributions: Sequence[Contribution]) -> list[float]:
        """The metric of the server's model, and of the model with each contribution."""
        found: Any = None
        with self._context.off_the_clock():
            if self._context.is_first:
                try:
                    found = [self._metric([]), *(self._metric(each.gradients) for each in contributions)]
                except Exception as error:  # the others wait for this worker, and are told what it says
                    found = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            found = self._context.collective.broadcast_object(found)
        if isinstance(found, str):
            raise UsageError(f"reject={self._validation}: {found}")
        return [float(each) for each in found]

    def _metric(self, changes: Sequence[Tensor]) -> float:
        assert self._context.evaluate is not None, "sessions give their strategies an evaluation"
        with self._model_with([self._validation.share * each for each in changes]) as model:
            metrics = self._context.evaluate(model)
        name = self._validation.metric
        if name not in metrics:
            raise unknown("metric", name, metrics)
        return metrics[name]
