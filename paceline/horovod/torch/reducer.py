"""Reduces an optimizer's gradients in buckets, each once its last gradient is there."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.horovod.channel import Operation
from paceline.horovod.negotiation import ALLREDUCE, Request
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.torch.collectives import sparse_allreduce_async
from paceline.horovod.torch.compression import Compression, Compressor
from paceline.horovod.torch.operations import REDUCTIONS, request_of, submit, synchronize

Parameter = torch.nn.Parameter
_BUCKET_BYTES = 2**18
"""Gradients of so many bytes are worth asking for while backward goes on."""


@dataclass(eq=False, frozen=True, slots=True)
class _Place:
    """One parameter, and where its backward passes are counted."""

    number: int
    parameter: Parameter
    name: str


class _Lot(NamedTuple):
    """The gradients that are sent of a bucket, one behind the other."""

    places: list[_Place]
    parameters: list[Parameter]
    flat: Tensor
    views: list[Tensor]
    """Of `flat`; each is its parameter's gradient while that is under way, and until the script takes it away."""
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
    """What was sent last time, which a steady step sends again."""
    compressed: tuple[_Described, Request] | None = None
    """What was asked for of it last time, where it travels compressed."""

    @property
    def name(self) -> str:
        more = f" and {len(self.places) - 1} more" if len(self.places) > 1 else ""
        return f"{ALLREDUCE}.{self.places[0].name}{more}"


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
        self._begin()

    def forget(self) -> None:
        """What is under way does not count: ranks have gone, or the script goes back."""
        self._waits = []
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
        lot = bucket.lot
        if lot is None or not _is_filled(lot, bucket):
            lot = self._fill(bucket)
        if lot is None:
            return
        if self._compression is Compression.none:
            operation = Operation(lot.request, [lot.flat], [lot.flat], shapes=((lot.flat.numel(),),))
            self._waits.append(partial(synchronize, submit(operation, self._process_set)))
        else:
            self._send_compressed(bucket, lot)
        self._waits.append(partial(_put_back, lot))

    def _fill(self, bucket: _Bucket) -> _Lot | None:
        """Put the gradients where they are sent from; sparse ones are started by themselves."""
        trained = [place for place in bucket.places if place.parameter.requires_grad]
        dense = [place for place in trained if not self._goes_alone(place, bucket)]
        if not dense:
            return None
        lot = bucket.lot
        if lot is None or lot.places != dense:
            lot = bucket.lot = self._make_lot(bucket.name, dense)
            bucket.compressed = None
        torch._foreach_copy_(lot.views, [_gradient(parameter) for parameter in lot.parameters])
        _put_back(lot)
        return lot

    def _make_lot(self, name: str, places: list[_Place]) -> _Lot:
        parameters = [place.parameter for place in places]
        flat = torch.empty(
            sum(each.numel() for each in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        parts = flat.split([each.numel() for each in parameters])
        orders = [_memory_order(each) for each in parameters]
        laid = [
            part.view(each.permute(order).shape) for part, each, order in zip(parts, parameters, orders, strict=True)
        ]
        views = [each.permute([*map(order.index, sorted(order))]) for each, order in zip(laid, orders, strict=True)]
        names = [_ordered_name(place.name, order) for place, order in zip(places, orders, strict=True)]
        return _Lot(places, parameters, flat, views, self._request(name, names, laid))

    def _request(self, name: str, names: Sequence[str], tensors: Sequence[Tensor]) -> Request:
        return request_of(names, tensors, kind=ALLREDUCE, about=self._about, name=name)

    def _send_compressed(self, bucket: _Bucket, lot: _Lot) -> None:
        small, contexts = zip(*map(self._compression.compress, lot.views), strict=True)
        sent = [each.contiguous() for each in small]
        described = [(each.dtype, each.shape) for each in sent]
        if bucket.compressed is None or bucket.compressed[0] != described:
            bucket.compressed = (
                described,
                self._request(bucket.name, [f"{ALLREDUCE}.{place.name}" for place in lot.places], sent),
            )
        handle = submit(Operation(bucket.compressed[1], sent, sent, is_group=True), self._process_set)

        def wait() -> None:
            results = [*map(self._compression.decompress, synchronize(handle), contexts)]
            with torch.no_grad():
                torch._foreach_copy_(lot.views, results)

        self._waits.append(wait)

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
        bucket, num_bytes = _Bucket([], is_asked_for=False), 0
        for place in same:
            if num_bytes >= _BUCKET_BYTES or not bucket.places:
                bucket, num_bytes = _Bucket([], is_asked_for=False), 0
                buckets.append(bucket)
            bucket.places.append(place)
            num_bytes += place.parameter.nbytes
    return buckets


def _alike(places: Iterable[_Place]) -> list[list[_Place]]:
    """By dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[_Place]] = {}
    for place in places:
        found.setdefault((place.parameter.dtype, place.parameter.device), []).append(place)
    return [*found.values()]


def _memory_order(parameter: Parameter) -> list[int]:
    """Its dimensions, as they lie: autograd wants gradients to lie alike. Those of one that has gaps are in order."""
    dimensions = [*range(parameter.dim())]
    order = sorted(dimensions, key=parameter.stride, reverse=True)
    is_dense = not parameter.is_contiguous() and parameter.permute(order).is_contiguous()
    return order if is_dense else dimensions


def _ordered_name(name: str, order: list[int]) -> str:
    """Ranks whose gradients lie differently are to hear of it."""
    return f"{ALLREDUCE}.{name}" + (f" in the order {order}" if order != sorted(order) else "")


def _is_filled(lot: _Lot, bucket: _Bucket) -> bool:
    """Whether all that is to be sent lies in it already."""
    is_certain = not bucket.num_missing and len(lot.places) == len(bucket.places)
    if not is_certain and [each for each in bucket.places if each.parameter.requires_grad] != lot.places:
        return False
    return all(map(operator.is_, [each.grad for each in lot.parameters], lot.views))


def _put_back(lot: _Lot) -> None:
    for parameter, view in zip(lot.parameters, lot.views, strict=True):
        if parameter.grad is not view:
            parameter.grad = view


def _gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
