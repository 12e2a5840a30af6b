"""Flat gradient buckets: every `param.grad` is a view of its bucket, and a full bucket is announced during backward."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.layout import Layout

NONFINITE, STOP = (
    0,
    1,
)  # places among a bucket's flags; one a tensor follows, above zero where it has a gradient
_FLAGS = 2


class Bucket(NamedTuple):
    """Values, and the flags that travel with them; the two lie one behind the other in `flat`."""

    flat: Tensor
    values: Tensor
    flags: Tensor


@final
class GradientBuckets:
    """Keeps gradients in one buffer and tells when they are final, for as long as it lives.

    Args:
        parameters: in the order of the layout.
        layout: their places.
        buffer: uint8 tensor of `layout.num_bytes`, on the parameters' device.
        on_bucket: called with a bucket's index once its gradients are final on this worker, in the layout's order.
        on_backward_end: called when a backward pass ends, after every bucket has been announced.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        layout: Layout,
        buffer: Tensor,
        *,
        on_bucket: Callable[[int], None] | None = None,
        on_backward_end: Callable[[], None] | None = None,
    ) -> None:
        self.layout = layout
        self.parameters = list(parameters)
        self.views = layout.views(buffer)
        flats = [segment.view(buffer) for segment in layout.segments]
        ends = [flat.numel() - segment.tail for flat, segment in zip(flats, layout.segments, strict=True)]
        self.buckets = [Bucket(flat, flat[:end], flat[end:]) for flat, end in zip(flats, ends, strict=True)]
        self.is_synchronizing = True
        self._on_bucket = on_bucket
        self._on_backward_end = on_backward_end
        self._flags: list[list[float]] = [[] for _ in flats]  # what each bucket's hold
        self._bucket_of = {slot.index: i for i, segment in enumerate(layout.segments) for slot in segment.slots}
        self._indices = [[slot.index for slot in segment.slots] for segment in layout.segments]
        self._missing = [len(indices) for indices in self._indices]
        self._next_bucket = 0
        self._in_backward = False
        self._hooks = [
            when_gradient_is_ready(parameter, self._on_gradient, index)
            for index, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def adopt(self, index: int) -> bool:
        """Make the parameter's gradient a view of its bucket; false, and zeros, where it has none."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is view:
            return True
        if gradient is None:
            view.zero_()
            return False
        if gradient.layout is not torch.strided:
            name = self._name(index)
            raise UsageError(f"parameter {name!r} has a sparse gradient; give its layer sparse=False")
        # Under create_graph it has a history, which the bucket must not take on.
        view.copy_(gradient.detach() if gradient.requires_grad else gradient)
        parameter.grad = view
        return True

    def fill_flags(self, bucket: int, *, stop: bool, nonfinite: bool) -> None:
        """Adopt the bucket's gradients and write its flags."""
        flags = [float(nonfinite), float(stop), *(float(self.adopt(index)) for index in self._indices[bucket])]
        # What the last exchange left is most often what this one is to say: 20 us less a bucket.
        if flags != self._flags[bucket]:
            self.buckets[bucket].flags.copy_(torch.tensor(flags))
            self._flags[bucket] = flags

    def read_flags(self, bucket: int) -> tuple[bool, bool]:
        """Whether any rank's gradients were not finite, and whether any rank asks to stop.

        Also gives every parameter that some rank has a gradient for its view, and the others none.
        """
        flags = self._flags[bucket] = self.buckets[bucket].flags.tolist()
        for index, used in zip(self._indices[bucket], flags[_FLAGS:], strict=True):
            parameter = self.parameters[index]
            if (parameter.grad is not None) != (used > 0):
                parameter.grad = self.views[index] if used > 0 else None
        return flags[NONFINITE] > 0, flags[STOP] > 0

    def find_nonfinite(self, bucket: int) -> str | None:
        """The name of a parameter in the bucket whose gradient holds NaN or infinity."""
        if _is_finite(self.buckets[bucket].values):
            return None
        culprits = (self._name(index) for index in self._indices[bucket] if not _is_finite(self.views[index]))
        return next(culprits, None)

    def find_any_nonfinite(self) -> str | None:
        """The name of a parameter whose gradient holds NaN or infinity."""
        found = (self.find_nonfinite(bucket) for bucket in range(len(self.buckets)))
        return next((name for name in found if name is not None), None)

    def flush(self) -> None:
        """Announce the buckets that this backward pass has not filled, and be ready for the next."""
        while self._next_bucket < len(self._missing):
            self._announce()
        self._next_bucket = 0
        self._missing = [len(indices) for indices in self._indices]
        self._in_backward = False

    def _on_gradient(self, index: int) -> None:
        self.adopt(index)
        if not self.is_synchronizing or (self._on_bucket is None and self._on_backward_end is None):
            return
        if not self._in_backward:
            self._in_backward = True
            # The engine runs queued callbacks when the whole backward pass is done, before it returns.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] < 0:
            name = self._name(index)
            raise UsageError(
                f"the gradient of {name!r} was computed twice in one backward pass, or the one before it failed"
            )
        while self._next_bucket < len(self._missing) and self._missing[self._next_bucket] == 0:
            self._announce()

    def _announce(self) -> None:
        if self._on_bucket is not None:
            self._on_bucket(self._next_bucket)
        self._next_bucket += 1

    def _end(self) -> None:
        self.flush()
        if self._on_backward_end is not None:
            self._on_backward_end()

    def _name(self, index: int) -> str:
        return self.layout.specs[index].name


def when_gradient_is_ready(parameter: torch.nn.Parameter, method: Callable[[int], None], index: int) -> RemovableHandle:
    """Call `method(index)` whenever backward has computed the parameter's gradient, while the method's object lives.

    The hook refers to that object weakly: torch would never free an object that a parameter's hook refers to and that
    refers to the parameter.
    """
    weak = weakref.WeakMethod(method)

    def hook(_: Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(index)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle


def _is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    # One pass: a sum is finite only if every term is, or it overflows, which the second look settles.
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    total = tensor.sum(dtype=torch.float32) if is_half else tensor.sum()
    return math.isfinite(abs(total.item())) or bool(tensor.isfinite().all())
