"""Reduces an optimizer's gradients in buckets, each once its last gradient is there."""

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.gradient_views import COUNTS_GRADIENTS, GradientViews
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.flat import Flat
from paceline.horovod.operation import Operation
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.requests import ALLREDUCE, Request
from paceline.horovod.rooms import Room
from paceline.horovod.runtime import runtime
from paceline.horovod.torch.collectives import sparse_allreduce_async
from paceline.horovod.torch.compression import Compression, Compressor
from paceline.horovod.torch.operations import REDUCTIONS, Handle, request_of, submit, synchronize

Parameter = torch.nn.Parameter
_BUCKET_BYTES = 2**18
"""Gradients of so many bytes are worth asking for while backward goes on: one alone, or smaller ones together."""
_SMALL_BYTES = 2**14
"""A gradient of so few bytes is copied sooner than Python names it."""


@dataclass(eq=False, frozen=True, slots=True)
class _Place:
    """One parameter, and where its backward passes are counted."""

    number: int
    parameter: Parameter
    name: str


class _Lot(NamedTuple):
    """Gradients that are sent together, one behind the other."""

    places: list[_Place]
    parameters: list[Parameter]
    flat: Flat
    """What is sent."""
    given: GradientViews
    """The same, as the parameters' gradients while these are under way, and until the script takes them away."""
    request: Request


_Described = list[tuple[torch.dtype, torch.Size]]


@dataclass(eq=False, slots=True)
class _Bucket:
    """Parameters of one dtype and device, whose gradients are one operation."""

    places: list[_Place]
    is_asked_for: bool
    """By the script, as a group."""
    num_missing: int = 0
    """Gradients that have to come before it is sent."""
    is_sent: bool = False
    lot: _Lot | None = None
    """What was sent last time, which a steady step sends again, if its gradients are in order."""
    asked: tuple[_Described, Request] | None = None
    """What was asked for last time, otherwise."""

    @property
    def name(self) -> str:
        more = f" and {len(self.places) - 1} more" if len(self.places) > 1 else ""
        return f"{ALLREDUCE}.{self.places[0].name}{more}"

    @property
    def is_in_order(self) -> bool:
        """Whether its gradients are worth laying one behind the other: on CPUs they are reduced there."""
        first, num_bytes = self.places[0].parameter, sum(each.parameter.nbytes for each in self.places)
        return first.is_contiguous() and (first.is_cpu or num_bytes < len(self.places) * _SMALL_BYTES)


@final
class Reducer:
    """Reduces the gradients of one optimizer's parameters, each after so many backward passes.

    Args:
        names: of every parameter of the optimizer.
        groups: parameters whose gradients are reduced together once all of a group are there.
        prescale, postscale: factors before and after the reduction.
    """

    def __init__(
        self,
        names: dict[Parameter, str],
        *,
        compression: type[Compressor],
        backward_passes_per_step: int,
        op: int,
        prescale: float,
        postscale: float,
        groups: Sequence[Sequence[Parameter]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.passes_per_step = backward_passes_per_step
        self._compression, self._op = compression, op
        self._about = (REDUCTIONS[op], prescale, postscale, 0)
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self._waits: list[Callable[[], object]] = []  # for what is under way
        self._handles: list[Handle] = []  # of what is under way
        self._stale: list[Handle] = []  # of what does not count any more
        self._made_dense: list[Parameter] = []  # whose optimizer expects sparse gradients
        trained = [parameter for parameter in names if parameter.requires_grad]
        places = [_Place(number, parameter, names[parameter]) for number, parameter in enumerate(trained)]
        self._buckets = _buckets(places, groups)
        self._passes_left = [0] * len(places)
        self._begin()
        for bucket in self._buckets:
            for place in bucket.places:
                hook = partial(self._on_gradient, place.number, bucket)
                place.parameter.register_post_accumulate_grad_hook(hook)

    @property
    def is_under_way(self) -> bool:
        begun = any(not bucket.is_sent and bucket.num_missing < len(bucket.places) for bucket in self._buckets)
        return bool(self._waits) or (begun and self._takes_part)

    @property
    def _takes_part(self) -> bool:
        return self._process_set.included() is not False

    def set_passes_per_step(self, passes: int) -> None:
        self.passes_per_step = passes
        self._begin()

    def synchronize(self) -> None:
        """Reduce what is not under way yet, with zeros where there is no gradient, and wait for all."""
        for bucket in self._buckets:
            if not bucket.is_sent:
                self._send(bucket)
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        for parameter in self._made_dense:
            parameter.grad = _gradient(parameter).to_sparse(1)
        self._handles = []
        self._begin()

    def forget(self) -> None:
        """What is under way does not count: ranks have gone, or the script goes back."""
        self._stale += self._handles
        self._waits, self._handles = [], []
        for place in (place for bucket in self._buckets if bucket.is_sent for place in bucket.places):
            if place.parameter.grad is not None:  # into which results may come still
                place.parameter.grad = place.parameter.grad.clone()
        for bucket in self._buckets:
            bucket.lot = None
        self._begin()

    def _begin(self) -> None:
        self._made_dense = []
        self._passes_left = [self.passes_per_step] * len(self._passes_left)
        for bucket in self._buckets:
            bucket.num_missing, bucket.is_sent = len(bucket.places), False

    def _on_gradient(self, number: int, bucket: _Bucket, parameter: Tensor) -> None:
        left = self._passes_left[number] = self._passes_left[number] - 1
        if left == 0:
            bucket.num_missing -= 1
            if bucket.num_missing == 0:
                self._send(bucket)
        elif left < 0:
            name = next(place.name for place in bucket.places if place.number == number)
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                f"backward_passes_per_step to accumulate gradients locally (parameter {name!r})."
            )

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        bucket.is_sent = True
        if not self._takes_part:
            return
        for stale in self._stale:  # of the same names, into the same memory
            with suppress(HorovodInternalError):
                synchronize(stale)
        self._stale = []
        lot = bucket.lot
        if lot is None or not self._refill(lot, bucket):
            trained = [place for place in bucket.places if place.parameter.requires_grad]
            dense = [place for place in trained if not self._goes_alone(place, bucket)]
            if not dense:
                return
            if not bucket.is_in_order or self._compression is not Compression.none:
                self._send_each(bucket, dense)
                return
            self._fill(bucket, dense)
        self._send_lot(bucket)

    def _send_lot(self, bucket: _Bucket) -> None:
        lot = bucket.lot
        assert lot is not None
        room = self._room_of(lot)
        whole = lot.flat.whole
        if room is not None and room.flat.whole is not whole:
            room.given.leave_all()
        operation = Operation(lot.request, [whole], [whole], shapes=((whole.numel(),),))
        # Held from here on: another optimizer of the same names, which uses the room next, leaves them their values.
        views = list(lot.given.views)
        self._waits += [partial(synchronize, self._ask(operation)), partial(_put_back, lot.parameters, views)]

    def _ask(self, operation: Operation) -> Handle:
        handle = submit(operation, self._process_set)
        self._handles.append(handle)
        return handle

    def _fill(self, bucket: _Bucket, places: list[_Place]) -> None:
        """Put the gradients where they are sent from, and will lie from here on."""
        parameters = [place.parameter for place in places]
        lot = bucket.lot
        if lot is None or lot.places != places:
            whole = torch.cat([each.flatten() for each in parameters])
            flat = Flat.cut(whole, [each.shape for each in parameters])
            given = GradientViews(flat.views, [whole] * len(flat.views))
            request = self._request(bucket, places, flat.views, has_room=whole.is_cpu and COUNTS_GRADIENTS)
            lot = _Lot(places, parameters, flat, given, request)
            bucket.lot = lot = self._moved_in(lot)
        _lay(lot, [*map(_gradient, parameters)], are_new=False)

    def _refill(self, lot: _Lot, bucket: _Bucket) -> bool:
        """Lay what is new where it was last time; false if it is not as last time what is to be sent."""
        is_certain = not bucket.num_missing and len(lot.places) == len(bucket.places)
        if not is_certain and [each for each in bucket.places if each.parameter.requires_grad] != lot.places:
            return False
        gradients = [each.grad for each in lot.parameters]
        are_there = [*map(operator.is_, gradients, lot.given.views)]
        if all(are_there):
            return True
        dense = [each for each in gradients if each is not None and not each.is_sparse]
        if len(dense) < len(gradients):
            return False
        are_new = not any(are_there)
        if are_new:  # what stays from step to step is to stay the same tensor
            bucket.lot = lot = self._moved_in(lot)
        _lay(lot, dense, are_new=are_new)
        return True

    def _moved_in(self, lot: _Lot) -> _Lot:
        """The same, in the room that its request has got since."""
        room = self._room_of(lot)
        return lot if room is None or room.given is lot.given else lot._replace(flat=room.flat, given=room.given)

    def _room_of(self, lot: _Lot) -> Room | None:
        return runtime().channel(self._process_set.process_set_id).room_of(lot.request)

    def _send_each(self, bucket: _Bucket, places: list[_Place]) -> None:
        gradients = [_gradient(place.parameter) for place in places]
        small, contexts = zip(*map(self._compression.compress, gradients), strict=True)
        sent = [each.contiguous() for each in small]
        described = [(each.dtype, each.shape) for each in sent]
        if bucket.asked is None or bucket.asked[0] != described or len(places) < len(bucket.places):
            bucket.asked = (described, self._request(bucket, places, sent))
        handle = self._ask(Operation(bucket.asked[1], sent, sent, is_group=True))

        def wait() -> None:
            results = zip(places, gradients, synchronize(handle), contexts, strict=True)
            for place, gradient, reduced, context in results:
                result = self._compression.decompress(reduced, context)
                if result is not gradient:
                    gradient.copy_(result)
                if place.parameter.grad is not gradient:
                    place.parameter.grad = gradient

        self._waits.append(wait)

    def _request(
        self, bucket: _Bucket, places: Sequence[_Place], tensors: Sequence[Tensor], *, has_room: bool = False
    ) -> Request:
        names = [f"{ALLREDUCE}.{place.name}" for place in places]
        return request_of(names, tensors, kind=ALLREDUCE, about=self._about, name=bucket.name, has_room=has_room)

    def _goes_alone(self, place: _Place, bucket: _Bucket) -> bool:
        """Whether the gradient is sparse, and started by itself here. Raises ValueError for one in a group."""
        parameter = place.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not parameter.grad.is_sparse:
            return False
        if bucket.is_asked_for and len(bucket.places) > 1:
            raise ValueError(
                f"the gradient of {place.name!r} is sparse, and sparse ones are not reduced in groups; "
                "leave it out of groups"
            )
        if self._sparse_as_dense:
            parameter.grad = parameter.grad.to_dense()
            self._made_dense.append(parameter)
            return False
        gradient = parameter.grad.coalesce()
        result = sparse_allreduce_async(gradient, name=place.name, op=self._op, process_set=self._process_set)
        self._waits.append(lambda: setattr(parameter, "grad", result()))
        return True


def _buckets(places: Sequence[_Place], groups: Sequence[Sequence[Parameter]]) -> list[_Bucket]:
    """Groups that are asked for; the rest by size, in the order in which backward comes to them."""
    by_parameter = {id(place.parameter): place for place in places}
    buckets = []
    for group in groups:
        members = [by_parameter.pop(id(parameter)) for parameter in group]
        buckets += [_Bucket(same, is_asked_for=True) for same in _alike(members)]
    for same in _alike(reversed(by_parameter.values())):
        several, room_bytes = _Bucket([], is_asked_for=False), 0
        for place in same:
            num_bytes = place.parameter.nbytes
            if num_bytes >= _BUCKET_BYTES:
                buckets.append(_Bucket([place], is_asked_for=False))
                continue
            if num_bytes > room_bytes:
                several, room_bytes = _Bucket([], is_asked_for=False), _BUCKET_BYTES
                buckets.append(several)
            several.places.append(place)
            room_bytes -= num_bytes
    return buckets


def _alike(places: Iterable[_Place]) -> list[list[_Place]]:
    """By dtype, device, and whether they lie in order."""
    found: dict[tuple[object, ...], list[_Place]] = {}
    for place in places:
        about = (place.parameter.dtype, place.parameter.device, place.parameter.is_contiguous())
        found.setdefault(about, []).append(place)
    return [*found.values()]


def _lay(lot: _Lot, gradients: Sequence[Tensor], *, are_new: bool) -> None:
    """Put the gradients where they are sent from.

    Args:
        are_new: all of them lie elsewhere.
    """
    lot.given.make_way(gradients)
    if are_new:
        lot.flat.lay(gradients, are_near=True)
    else:
        torch._foreach_copy_(lot.flat.views, list(gradients))
    for parameter, view in zip(lot.parameters, lot.given.views, strict=True):
        parameter.grad = view


def _put_back(parameters: Sequence[Parameter], views: Sequence[Tensor]) -> None:
    for parameter, view in zip(parameters, views, strict=True):
        if parameter.grad is not view:
            parameter.grad = view


def _gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
