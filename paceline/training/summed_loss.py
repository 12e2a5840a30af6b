"""Notices a loss that is a sum over its batch, where workers average gradients as if it were a mean."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from paceline.buckets import when_gradient_is_ready
from paceline.errors import UsageError
from paceline.hooks import Place, backward_calls, place_in_script
from paceline.training.sums import Look, look_into
from paceline.training.terms import Terms


class _Pass(NamedTuple):
    """A backward pass under way."""

    begun: list[Any]
    """Nodes of what it begins at."""
    is_of_losses: bool
    """No gradients are given for what it begins at."""
    found: Look
    """The names of a sum, and of a function that is not linear."""


@final
class SummedLoss:
    """Looks at the losses of the first step's backward passes: before a pass, which frees what a graph has saved. The
    first gradient of the model tells that it is one of the model's. What a script multiplies or divides is as it wants
    it.

    Args:
        num_samples: of the batch that the script has got last.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, rank: int, size: int, num_samples: Callable[[], int]
    ) -> None:
        self._rank, self._size, self._num_samples = rank, size, num_samples
        self.has_looked = False
        self._under_way: _Pass | None = None
        self._terms = Terms()
        self._bent: str | None = None
        self._place: Place | None = None  # of the last pass
        self._hooks = [when_gradient_is_ready(parameter, self._take, 0) for parameter in parameters]
        backward_calls.add(self)

    def close(self) -> None:
        backward_calls.remove(self)
        for hook in self._hooks:
            hook.remove()

    def end_step(self) -> None:
        """The first step's gradients are there. Warns, on rank 0, where its passes were of parts of a batch: it is no
        error, since the script may have divided the gradients. So it does of as many terms as samples that share
        nothing, which may be of a model each."""
        if self._rank != 0:
            return
        num_samples = self._num_samples()
        if self._bent is not None and self._place is not None:
            self._place.warn(
                f"the loss is a function of sums or means over the batch that is not linear ({self._bent}): workers "
                "average what each makes of its own batch, and one process would make it of all their batches. Take it "
                "of each sample and then the mean, where it may be; docs/script.md shows one of all batches"
            )
        elif self._terms.are_parts(num_samples):
            what = "the script calls backward() for one part of a batch after the other"
            self._warn(what, "parts", unless="the gradients are divided afterwards")
        elif self._terms.are_apart(num_samples):
            what = f"the loss adds up {num_samples} terms, as many as samples"
            self._warn(what, "terms", unless="each is of a model of its own")

    def _warn(self, what: str, parts: str, *, unless: str) -> None:
        assert self._place is not None
        self._place.warn(
            f"{what}, and nothing divides these losses: their gradients add up to a sum over the batch, and workers "
            f"average gradients as if it were a mean, so that a step is {self._size} times smaller than one process "
            f"would take with the same batches; divide each loss by the number of {parts}, unless {unless}"
        )

    def look(self, backward: Callable[..., Any], tensors: Any, *more: Any, **named: Any) -> Any:
        """The script calls `backward`; or a checkpoint does, inside of such a pass."""
        if isinstance(tensors, Iterator):
            tensors = tuple(tensors)
        gradients = more[0] if more else named.get("grad_tensors")
        losses = [each for each in _listed(tensors) if each.grad_fn is not None]
        num_samples = self._num_samples()
        before, found = self._under_way, Look(None, None)
        if not self.has_looked and num_samples > 1:
            found = _look_into(losses, gradients, num_samples)
        self._under_way = _Pass([each.grad_fn for each in losses], gradients is None, found)
        self._place = self._place if before else place_in_script()
        try:
            return backward(tensors, *more, **named)
        finally:
            self._under_way = before

    def _take(self, _: int) -> None:
        """A gradient of the model has come. Raises UsageError, if the pass began at a sum."""
        under_way, num_samples = self._under_way, self._num_samples()
        is_first, self.has_looked = not self.has_looked, True
        if under_way is None or not under_way.begun:
            return
        culprit = under_way.found.summed if is_first else None
        self._bent = self._bent or (under_way.found.bent if is_first else None)
        if under_way.is_of_losses:
            self._terms.add_pass(under_way.begun)
        under_way.begun.clear()  # looked at
        if culprit is None and self._terms.are_one_a_sample(num_samples):
            culprit = f"{num_samples} terms, one a sample"
        if culprit is not None and num_samples > 1:
            raise UsageError(
                f"rank {self._rank}: the loss is a sum over the batch ({culprit}), and workers average gradients as if "
                f"it were a mean, so that a step would be {self._size} times smaller than one process would take with "
                "the same batches; take the mean (reduction='mean'), divide the sum by what it adds up (not each "
                "term), or multiply the loss by worker.size"
            )


def _look_into(losses: Sequence[Tensor], gradients: Any, num_samples: int) -> Look:
    """What a backward pass begins at. One that is given gradients to begin with adds up the samples' losses where these
    are ones."""
    if gradients is None:
        looks = [look_into(loss, num_samples) for loss in losses]
        summed, bent = (
            (next(filter(None, names), None) for names in zip(*looks, strict=True)) if looks else (None, None)
        )
        return Look(summed, bent)
    adds = any(given.shape[:1] == (num_samples,) and bool((given == 1).all()) for given in _listed(gradients))
    return Look("backward(ones)" if adds else None, None)


def _listed(given: Any) -> list[Tensor]:
    return [each for each in ([given] if isinstance(given, Tensor) else given) if isinstance(each, Tensor)]
