"""Notices a loss that is a sum over its batch, where workers average gradients as if it were a mean."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.buckets import when_gradient_is_ready
from paceline.errors import UsageError
from paceline.training.sums import sum_in
from paceline.training.terms import Terms

_BACKWARD = torch.autograd.backward.__code__


@final
class SummedLoss:
    """Looks at the losses of the first step's backward passes, while their gradients come: a pass has been called
    further up the stack on a CPU, and in the script's own thread on a GPU, whose passes run in a thread of their own.
    What a script multiplies or divides is as it wants it.

    Args:
        num_samples: of the batch that the script has got last.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, rank: int, size: int, num_samples: Callable[[], int]
    ) -> None:
        self._rank, self._size, self._num_samples = rank, size, num_samples
        self.has_looked = False
        self._begun: list[Any] = []  # what the pass that was looked at last began at
        self._terms = Terms()
        self._thread = threading.get_ident()
        self._hooks = [when_gradient_is_ready(parameter, self._look, 0) for parameter in parameters]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def end_step(self) -> None:
        """The first step's gradients are there. Warns, on rank 0, where its passes were of parts of a batch: it is no
        error, since the script may have divided the gradients. So it does of as many terms as samples that share
        nothing, which may be of a model each."""
        if self._rank != 0:
            return
        num_samples = self._num_samples()
        if self._terms.are_parts(num_samples):
            what = "the script calls backward() for one part of a batch after the other"
            self._warn(what, "parts", unless="the gradients are divided afterwards")
        elif self._terms.are_apart(num_samples):
            what = f"the loss adds up {num_samples} terms, as many as samples"
            self._warn(what, "terms", unless="each is of a model of its own")

    def _warn(self, what: str, parts: str, *, unless: str) -> None:
        warnings.warn(
            f"{what}, and nothing divides these losses: their gradients add up to a sum over the batch, and workers "
            f"average gradients as if it were a mean, so that a step is {self._size} times smaller than one process "
            f"would take with the same batches; divide each loss by the number of {parts}, unless {unless}",
            stacklevel=5,
        )

    def _look(self, _: int) -> None:
        """Raises UsageError for a sum."""
        frame = _backward_above(sys._getframe()) or _backward_above(sys._current_frames().get(self._thread))
        if frame is None:
            self.has_looked = True
            return
        tensors, gradients = _listed(frame.f_locals["tensors"]), frame.f_locals["grad_tensors"]
        begun = [tensor.grad_fn for tensor in tensors]
        if len(begun) == len(self._begun) and all(map(is_, begun, self._begun)):
            return
        self._begun = begun
        if gradients is None:
            self._terms.add_pass(begun)
        num_samples = self._num_samples()
        culprit = None if self.has_looked else next(filter(None, _sums(begun, gradients, num_samples)), None)
        if culprit is None and self._terms.are_one_a_sample(num_samples):
            culprit = f"{num_samples} terms, one a sample"
        self.has_looked = True
        if culprit is not None and num_samples > 1:
            raise UsageError(
                f"rank {self._rank}: the loss is a sum over the batch ({culprit}), and workers average gradients as if "
                f"it were a mean, so that a step would be {self._size} times smaller than one process would take with "
                "the same batches; take the mean (reduction='mean'), divide the sum by what it adds up (not each "
                "term), or multiply the loss by worker.size"
            )


def _sums(begun: Sequence[Any], gradients: Any, num_samples: int) -> Iterator[str | None]:
    """The names of the sums among what a backward pass began at. One that was given gradients to begin with adds up the
    samples' losses where these are ones."""
    if gradients is None:
        yield from (sum_in(node, num_samples) for node in begun)
    elif any(given.shape[:1] == (num_samples,) and bool((given == 1).all()) for given in _listed(gradients)):
        yield "backward(ones)"


def _backward_above(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _BACKWARD:
        frame = frame.f_back
    return frame


def _listed(given: Any) -> list[Tensor]:
    return [each for each in ([given] if isinstance(given, Tensor) else given) if isinstance(each, Tensor)]
