"""Notices a loss that is a sum over its batch, where workers average gradients as if it were a mean."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.buckets import when_gradient_is_ready
from paceline.errors import UsageError

_BACKWARD = torch.autograd.backward.__code__
_SUM = 2  # of `reduction`, as torch's losses keep it for their backward pass
_PASSED_THROUGH = ("AddBackward0", "SubBackward0", "NegBackward0")


@final
class SummedLoss:
    """Looks at the loss of the first backward pass, while its gradients come: the pass has been called further up the
    stack on a CPU, and in the script's own thread on a GPU, whose passes run in a thread of their own. What a script
    multiplies or divides is as it wants it.

    Args:
        num_samples: of the batch that the script has got last.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, rank: int, size: int, num_samples: Callable[[], int]
    ) -> None:
        self._rank, self._size, self._num_samples = rank, size, num_samples
        self.has_looked = False
        self._thread = threading.get_ident()
        self._hooks = [when_gradient_is_ready(parameter, self._look, 0) for parameter in parameters]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, _: int) -> None:
        """Raises UsageError for a sum."""
        if self.has_looked:
            return
        self.has_looked = True
        num_samples = self._num_samples()
        culprit = next(filter(None, _sums(num_samples, self._thread)), None)
        if culprit is not None and num_samples > 1:
            raise UsageError(
                f"rank {self._rank}: the loss is a sum over the batch ({culprit}), and workers average gradients as if "
                f"it were a mean, so that a step would be {self._size} times smaller than one process would take with "
                "the same batches; take the mean (reduction='mean'), or multiply the loss by worker.size"
            )


def _sums(num_samples: int, thread: int) -> Iterator[str | None]:
    """The names of the sums among what the backward pass began at that is under way here, or else in that thread. One
    that was given gradients to begin with adds up the samples' losses where these are ones."""
    frame = _backward_above(sys._getframe()) or _backward_above(sys._current_frames().get(thread))
    if frame is None:
        return
    tensors, gradients = frame.f_locals["tensors"], frame.f_locals["grad_tensors"]
    if gradients is None:
        yield from (_sum_in(tensor.grad_fn, num_samples) for tensor in _listed(tensors))
    elif any(given.shape[:1] == (num_samples,) and bool((given == 1).all()) for given in _listed(gradients)):
        yield "backward(ones)"


def _backward_above(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _BACKWARD:
        frame = frame.f_back
    return frame


def _listed(given: Any) -> list[Tensor]:
    return [each for each in ([given] if isinstance(given, Tensor) else given) if isinstance(each, Tensor)]


def _sum_in(node: Any, num_samples: int) -> str | None:
    """The name of the sum that the loss is, or has as a term: one of torch's losses, or as many terms as there are
    samples in the batch."""
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    if node is not None and node.name() == "NegBackward0":
        return _sum_in(node.next_functions[0][0], num_samples)
    if node is not None and node.name() == "SumBackward0" and sizes and sizes[0] == num_samples:
        return "sum()"
    return _summed_loss_in(node)


def _summed_loss_in(node: Any) -> str | None:
    if node is None:
        return None
    if getattr(node, "_saved_reduction", None) == _SUM:
        return f"{node.name().removesuffix('Backward0')} with reduction='sum'"
    if node.name() in _PASSED_THROUGH:
        return next((name for inner, _ in node.next_functions if (name := _summed_loss_in(inner))), None)
    return None
