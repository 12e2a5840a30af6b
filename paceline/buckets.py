"""Flat gradient buckets: every `param.grad` is a view of its bucket, and a full bucket is announced during backward."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.arrays import as_array, is_finite
from paceline.errors import PacelineError, UsageError
from paceline.gradient_views import GradientViews
from paceline.hooks import OwnHook, Telling
from paceline.layout import NUM_FLAGS, Layout

# Places among a bucket's flags; one a tensor follows, above zero where it has a gradient.
NONFINITE, STOP, TURN, SPREAD = 0, 1, 2, 3
MOST_RANKS = 256
"""For so many, means of turns and of their squares are exact enough in every dtype to tell whether turns differ."""
_HALF_BYTES = 2
_FEW = 8  # tensors: so few are copied faster one by one, in code that backward has just used
_GRADIENT: Any = Tensor.grad
_grad_of = _GRADIENT.__get__  # which `GradientReads` does not take for a read of the script's
_TURNS, _HALF_TURNS = 16, 3  # how many are told apart
_LEAST_VARIANCE = 1e-3


class OutOfTurn(Exception):
    """Ranks joined gradients of different backward passes."""


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
        on_bucket: called with a bucket's index once its gradients are final on this worker and lie in it, in the
            layout's order, when the next gradient is computed or the backward pass ends.
        apart: places of parameters that the layout gives no room, whose gradients stay as backward leaves them.
        on_backward_end: called when a backward pass ends, after every bucket has been announced.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        layout: Layout,
        buffer: Tensor,
        *,
        apart: frozenset[int] = frozenset(),
        on_bucket: Callable[[int], None] | None = None,
        on_backward_end: Callable[[], None] | None = None,
    ) -> None:
        self.layout = layout
        self.parameters = list(parameters)
        self._apart = apart
        flats = [segment.view(buffer) for segment in layout.segments]
        self._bucket_of = {slot.index: i for i, segment in enumerate(layout.segments) for slot in segment.slots}
        places = layout.views(buffer)
        self._given = GradientViews(places, [flats[self._bucket_of[index]] for index in range(len(places))])
        self.views = self._given.views
        self._places = [view.data_ptr() for view in self.views]
        ends = [flat.numel() - segment.tail for flat, segment in zip(flats, layout.segments, strict=True)]
        self.buckets = [Bucket(flat, flat[:end], flat[end:]) for flat, end in zip(flats, ends, strict=True)]
        self.is_synchronizing = True
        self.waits = False
        """Whether buckets are announced by `finish` alone, and not as they are filled."""
        self.is_reached = False
        """Whether a pass that has ended has brought gradients that wait for `finish`."""
        self.on_end: Callable[[], None] | None = None
        """Called where a pass has ended, after all else."""
        self._on_bucket = on_bucket
        self._on_backward_end = on_backward_end
        self._flags: list[list[float]] = [[] for _ in flats]  # what each bucket's hold
        self._num_turns = [_HALF_TURNS if flat.itemsize <= _HALF_BYTES else _TURNS for flat in flats]
        self._used: list[list[float]] = [[] for _ in flats]  # one a gradient, above zero where there is one
        self._readable_flags = [as_array(_real(bucket.flags)) for bucket in self.buckets]
        self._indices = [[slot.index for slot in segment.slots] for segment in layout.segments]
        self._num_gradients = [len(indices) for indices in self._indices]
        self.missing = self._num_gradients.copy()
        """Gradients of each bucket that are to come in this pass."""
        self._next_bucket = 0
        self.is_next_full = False
        """Whether a bucket is full, and leaves when the next gradient comes."""
        self.in_backward = False
        """Whether a pass is under way that has brought one of the gradients."""
        self._tell = Telling()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_Arrival(self, index, self._bucket_of[index]))
            for index, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def adopt(self, bucket: int) -> None:
        """Make the bucket's gradients views of it, and zeros of those that are none."""
        self._used[bucket] = self._adopt(self._indices[bucket])

    def used(self, bucket: int) -> Sequence[float]:
        """One number for each of the bucket's gradients, as last adopted: above zero where there was one."""
        return self._used[bucket]

    def take_up(self, bucket: int, values: Tensor, used: Sequence[float]) -> None:
        """Put gradients in place as if a backward pass had computed them: those of a bucket of the same layout."""
        self.buckets[bucket].values.copy_(values)
        for index, is_used in zip(self._indices[bucket], used, strict=True):
            self._put(index, is_used=is_used > 0)

    def find_unused(self) -> str | None:
        """Adopt all gradients; the name of a parameter that has none and should: of rows there may be none."""
        for bucket, indices in enumerate(self._indices):
            self.adopt(bucket)
            for index, used in zip(indices, self._used[bucket], strict=True):
                if not used and index not in self._apart:
                    return self._name(index)
        return None

    def fill_flags(self, bucket: int, *, stop: bool, nonfinite: bool, turn: int = 0) -> None:
        """Write the flags of a bucket whose gradients have been adopted.

        Args:
            turn: the same on every rank, of `MOST_RANKS` at most, or `read_flags` raises; it is told apart from the
                next 15, in half precision from the next two.
        """
        turn %= self._num_turns[bucket]
        flags = [float(nonfinite), float(stop), float(turn), float(turn * turn), *self._used[bucket]]
        # What the last exchange left is most often what this one is to say: 20 us less a bucket.
        if flags != self._flags[bucket]:
            self.buckets[bucket].flags.copy_(torch.tensor(flags))
            self._flags[bucket] = flags

    def read_flags(self, bucket: int) -> tuple[bool, bool]:
        """Whether any rank's gradients were not finite, and whether any rank asks to stop.

        Also gives every parameter that some rank has a gradient for its view, and the others none.

        Raises:
            OutOfTurn: ranks gave different turns. It raises on all of them.
        """
        told, flags = self._flags[bucket], self._readable_flags[bucket].tolist()
        if flags != told:
            self._flags[bucket] = flags
            if abs(flags[SPREAD] - flags[TURN] ** 2) > _LEAST_VARIANCE:
                raise OutOfTurn
            first = NUM_FLAGS
            for index, before, used in zip(self._indices[bucket], told[first:], flags[first:], strict=True):
                if (before > 0) != (used > 0):
                    self._put(index, is_used=used > 0)
        return flags[NONFINITE] > 0, flags[STOP] > 0

    def find_nonfinite(self, bucket: int) -> str | None:
        """The name of a parameter in the bucket whose gradient holds NaN or infinity."""
        if is_finite(self.buckets[bucket].values):
            return None
        culprits = (self._name(index) for index in self._indices[bucket] if not is_finite(self.views[index]))
        return next(culprits, None)

    def name_at(self, bucket: int, element: int) -> str:
        """The parameter that an element of the bucket belongs to."""
        slots = self.layout.segments[bucket].slots
        return next(slot.spec.name for slot in slots if slot.offset <= element < slot.stop)

    def find_any_nonfinite(self) -> str | None:
        """The name of a parameter whose gradient holds NaN or infinity."""
        found = (self.find_nonfinite(bucket) for bucket in range(len(self.buckets)))
        return next((name for name in found if name is not None), None)

    def finish(self) -> None:
        """A pass is over: announce what it has not announced yet, and that it is over."""
        self.is_reached = False
        self.flush()
        if self._on_backward_end is not None:
            self._on_backward_end()

    def flush(self) -> None:
        """Announce the buckets that this backward pass has not filled, and be ready for the next."""
        while self._next_bucket < len(self.missing):
            self._announce()
        self._next_bucket = 0
        self.missing = self._num_gradients.copy()
        self.is_next_full = self.in_backward = False

    def take(self, index: int) -> None:
        """Backward has computed this gradient."""
        if not self.is_synchronizing or (self._on_bucket is None and self._on_backward_end is None):
            self._adopt([index])
            return
        if not self.in_backward:
            self.in_backward = True
            # The engine runs queued callbacks when the whole backward pass is done, before it returns.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        # Those that the gradient before this one has filled: by now a script's own hooks on that one have run as well.
        while self._is_full() and not self.waits:
            self._announce()
        bucket = self._bucket_of[index]
        self.missing[bucket] -= 1
        if self.missing[bucket] < 0:
            name = self._name(index)
            raise UsageError(
                f"the gradient of {name!r} was computed twice in one backward pass, or the one before it failed; "
                "torch.utils.checkpoint does so with use_reentrant=True: give it use_reentrant=False"
            )
        while self._is_full() and not self.waits and self._has_no_other_hooks(self._next_bucket):
            self._announce()
        self.is_next_full = self._is_full()

    def _is_full(self) -> bool:
        """Whether the next bucket is. The last one leaves as the pass ends."""
        return self._next_bucket < len(self.missing) - 1 and self.missing[self._next_bucket] == 0

    def _has_no_other_hooks(self, bucket: int) -> bool:
        """Whether nobody but Paceline looks at the bucket's gradients as they come."""
        for index in self._indices[bucket]:  # no generators, of which each item is a call
            for hook in (self.parameters[index]._post_accumulate_grad_hooks or {}).values():
                if not is_own_hook(hook):
                    return False
        return True

    def _adopt(self, indices: Sequence[int]) -> list[float]:
        # All at once: on a conv net this takes 40 us, and gradient by gradient 100.
        used, new, views = [], [], []
        are_any_kept = len(indices) < len(self.views) or self._given.are_any_held()  # one call for all
        for index in indices:
            parameter = self.parameters[index]
            gradient = _grad_of(parameter)
            used.append(0.0 if gradient is None else 1.0)
            if index in self._apart:
                continue
            if are_any_kept and gradient is not self.views[index] and self._given.is_kept(index):
                self._given.leave(index)  # the script keeps a gradient of an earlier pass
            view = self.views[index]
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                if gradient.layout is not torch.strided and gradient.is_sparse:
                    gradient = gradient.to_dense()  # of an Embedding with sparse=True
                if gradient.layout is not torch.strided or gradient.requires_grad or gradient.dtype is not view.dtype:
                    raise UsageError(self._refusal(index, gradient))
                new.append(gradient)
                views.append(view)
                parameter.grad = view
            if view.data_ptr() != self._places[index]:
                raise UsageError(self._refusal(index, parameter))
        if len(new) > _FEW:
            torch._foreach_copy_(views, new)
        else:
            for view, gradient in zip(views, new, strict=True):
                view.copy_(gradient)
        return used

    def _put(self, index: int, *, is_used: bool) -> None:
        """Some rank has a gradient of the parameter, or none has."""
        if index not in self._apart:
            self.parameters[index].grad = self.views[index] if is_used else None

    def _announce(self) -> None:
        bucket = self._next_bucket
        self._used[bucket] = self._adopt(self._indices[bucket])
        if self._on_bucket is not None:
            self._on_bucket(bucket)
        self._next_bucket += 1

    def _end(self) -> None:
        try:
            if self.waits:
                self.in_backward, self.is_reached = False, True
            else:
                self.finish()
            if self.on_end is not None:
                self.on_end()
        except PacelineError as error:
            self._tell(error)
            raise

    def _refusal(self, index: int, gradient: Tensor) -> str:
        prepared, now = self.layout.specs[index].dtype, gradient.dtype
        if gradient is self.parameters[index] and now is prepared and self.views[index].is_shared():
            return (
                f"the script has moved the gradient of {self._name(index)!r} into shared memory (share_memory_()), and "
                "it is no longer where workers exchange it; share a copy: parameter.grad.clone().share_memory_()"
            )
        if now is not prepared or gradient is self.parameters[index]:
            became = f"is {now} instead of {prepared}" if now is not prepared else "was moved or converted meanwhile"
            return (
                f"parameter {self._name(index)!r} {became}: the script has converted the model after prepare "
                "(model.half(), .double(), .to(...)), and its gradients are not where workers exchange them; convert "
                "it before prepare, or compute in another dtype with torch.autocast. Where it has put another tensor's "
                "memory in the place of a gradient's (parameter.grad.data = ...), let it set parameter.grad itself"
            )
        if gradient.requires_grad:
            return (
                f"the gradient of {self._name(index)!r} has a history (create_graph=True), which it would lose when "
                "workers exchange it; take gradients of gradients with torch.autograd.grad(..., create_graph=True), or "
                "use the strategy single"
            )
        return (
            f"the gradient of {self._name(index)!r} is {gradient.layout}; only dense and sparse_coo ones are exchanged"
        )

    def _name(self, index: int) -> str:
        return self.layout.specs[index].name


def _real(flags: Tensor) -> Tensor:
    return torch.view_as_real(flags)[:, 0] if flags.is_complex() else flags


@final
class _WhenReady:
    """Calls a method while its object lives. torch would never free an object that a parameter's hook refers to and
    that refers to the parameter."""

    def __init__(self, method: Callable[[int], None], index: int) -> None:
        # What WeakMethod does, without its calls in Python: 0.15 us a gradient and not 1.4.
        self._owner, self._call, self._index = weakref.ref(method.__self__), method.__func__, index  # type: ignore[attr-defined]
        self._tell = Telling()

    def __call__(self, _: Tensor) -> None:
        owner = self._owner()
        if owner is None:
            return
        try:
            self._call(owner, self._index)
        except PacelineError as error:
            self._tell(error)
            raise


@final
class _Arrival:
    """Backward calls it for one of the buckets' gradients. Most often it counts the gradient and calls nothing: only a
    pass's first gradient, and one that fills a bucket before the last, need more."""

    def __init__(self, buckets: GradientBuckets, index: int, bucket: int) -> None:
        self._buckets, self._index, self._bucket = weakref.ref(buckets), index, bucket
        self._fills_with = 0 if bucket == len(buckets.buckets) - 1 else 1  # so many missing; the last one never does
        self._tell = Telling()

    def __call__(self, _: Tensor) -> None:
        buckets = self._buckets()
        if buckets is None:
            return
        missing = buckets.missing
        is_counted = buckets.in_backward and buckets.is_synchronizing and not buckets.is_next_full
        if is_counted and missing[self._bucket] > self._fills_with:
            missing[self._bucket] -= 1
            return
        try:
            buckets.take(self._index)
        except PacelineError as error:
            self._tell(error)
            raise


@final
class Computed(deque[Tensor]):
    """True once backward has computed one of these parameters' gradients, until it is cleared.

    What backward calls is `append` itself, which runs no Python: 1 us a gradient less, of those that only tell this.
    It refers to itself by way of the parameters, where Python finds no cycle: they are not freed before `close`.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(maxlen=1)
        self._hooks = [parameter.register_post_accumulate_grad_hook(self.append) for parameter in parameters]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.clear()


_OWN_HOOKS = (_WhenReady, _Arrival, Computed, OwnHook)


def is_own_hook(hook: object) -> bool:
    """Whether it is one of this package."""
    return isinstance(getattr(hook, "__self__", hook), _OWN_HOOKS)


def when_gradient_is_ready(parameter: torch.nn.Parameter, method: Callable[[int], None], index: int) -> RemovableHandle:
    """Call `method(index)` whenever backward has computed the parameter's gradient, while the method's object lives."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(_WhenReady(method, index))
    return handle
