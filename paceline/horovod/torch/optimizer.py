"""An optimizer whose gradients are reduced over all ranks while backward goes on."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from paceline.horovod import runtime as basics
from paceline.horovod.negotiation import ALLREDUCE
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.collectives import sparse_allreduce_async
from paceline.horovod.torch.compression import Compression, Compressor
from paceline.horovod.torch.operations import Adasum, Average, Handle, Sum, reduce_all_async, reduce_async, synchronize

Parameter = torch.nn.Parameter
_LOT_BYTES = 2**18
"""Gradients of so many bytes are worth asking for while backward goes on."""


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
        self._prescale, self._postscale = prescale, postscale
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self._waits: list[Callable[[], None]] = []  # for what is under way
        self._lot: list[_Place] = []  # what is asked for next, together: asking for each takes longer than a small one
        self._lot_bytes = 0
        places = {id(parameter): _Place(parameter, name, backward_passes_per_step) for parameter, name in names.items()}
        for group in groups:
            members = [places[id(parameter)] for parameter in group]
            for place in members:
                place.group = members
        self._places = [place for place in places.values() if place.parameter.requires_grad]
        for place in self._places:
            place.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, place))

    @property
    def is_under_way(self) -> bool:
        return bool(self._waits or self._lot)

    @property
    def is_active(self) -> bool:
        """Whether this rank takes part in the reductions at all."""
        return self._process_set.included() is not False

    def set_passes_per_step(self, passes: int) -> None:
        self.passes_per_step = passes
        for place in self._places:
            place.passes_left = passes

    def synchronize(self) -> None:
        """Reduce what is not under way yet, with zeros where there is no gradient, and wait for all."""
        if self.is_active:
            for place in self._places:
                if not place.is_ready and place.parameter.requires_grad:
                    if place.parameter.grad is None:
                        place.parameter.grad = torch.zeros_like(place.parameter)
                    self._start(place)
            self._send_lot()
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        self._begin()

    def forget(self) -> None:
        """What is under way does not count: ranks have gone, or the script goes back."""
        self._waits, self._lot, self._lot_bytes = [], [], 0
        self._begin()

    def _begin(self) -> None:
        for place in self._places:
            place.is_ready, place.passes_left = False, self.passes_per_step

    def _on_gradient(self, place: "_Place", parameter: Tensor) -> None:
        if place.passes_left == 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                f"backward_passes_per_step to accumulate gradients locally (parameter {place.name!r})."
            )
        place.passes_left -= 1
        if place.passes_left == 0 and self.is_active:
            self._start(place)

    def _start(self, place: "_Place") -> None:
        """Start the parameter's reduction, or its group's once that is complete."""
        group = place.group
        if _gradient(place.parameter).is_sparse:
            if len(group) > 1:
                raise ValueError(
                    f"the gradient of {place.name!r} is sparse, and sparse ones are not reduced in groups; "
                    "leave it out of groups"
                )
            self._start_sparse(place)
            return
        place.is_ready = True
        if len(group) == 1:
            self._lot.append(place)
            self._lot_bytes += place.parameter.nbytes
            if self._lot_bytes >= _LOT_BYTES:
                self._send_lot()
        elif all(each.is_ready or not each.parameter.requires_grad for each in group):
            self._send([each for each in group if each.is_ready], is_group=True)

    def _send_lot(self) -> None:
        lot, self._lot, self._lot_bytes = self._lot, [], 0
        if lot:
            self._send(lot, is_group=False)

    def _send(self, members: "list[_Place]", *, is_group: bool) -> None:
        gradients = [_gradient(each.parameter) for each in members]
        small, contexts = zip(*map(self._compression.compress, gradients), strict=True)
        sent = [each.contiguous() for each in small]
        ask = partial(reduce_async, ALLREDUCE, outputs=sent, name=members[0].name, is_group=True)
        if not is_group:
            ask = partial(reduce_all_async, [each.name for each in members])
        handle: Handle = ask(
            tensors=sent,
            op=self._op,
            prescale=self._prescale,
            postscale=self._postscale,
            process_set=self._process_set,
        )

        def wait() -> None:
            results = zip(members, gradients, synchronize(handle), contexts, strict=True)
            for place, gradient, reduced, context in results:
                result = self._compression.decompress(reduced, context)
                if result is not gradient:
                    gradient.copy_(result)
                if place.parameter.grad is not gradient:
                    place.parameter.grad = gradient

        self._waits.append(wait)

    def _start_sparse(self, place: "_Place") -> None:
        parameter = place.parameter
        gradient = _gradient(parameter)
        place.is_ready = True
        if self._sparse_as_dense:
            parameter.grad = gradient.to_dense()
            self._send([place], is_group=False)
            self._waits.append(partial(_make_sparse, parameter))  # as its optimizer expects it
            return
        result = sparse_allreduce_async(
            gradient.coalesce(), name=place.name, op=self._op, process_set=self._process_set
        )

        def wait() -> None:
            parameter.grad = result()

        self._waits.append(wait)


@dataclass(eq=False, slots=True)
class _Place:
    """What the reducer knows of one parameter."""

    parameter: Parameter
    name: str
    passes_left: int
    """Backward passes until its gradient is reduced."""
    is_ready: bool = False
    """Its gradient is under way, or waits for its group."""
    group: "list[_Place]" = field(default_factory=list)
    """What is reduced together with it; by itself it is a group of one."""

    def __post_init__(self) -> None:
        self.group = [self]


def _nothing() -> None:
    """What is done after a step that nobody records."""


class _Distributed(torch.optim.Optimizer):
    """What a distributed optimizer does besides its own class's work; mixed in before that class."""

    _reducer: Reducer
    _is_synchronized: bool
    _synchronizes: bool
    _after_step: Callable[[], None] = staticmethod(_nothing)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; to look at or clip them before `step`."""
        self._reducer.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` inside takes the gradients as they are: `synchronize` has been called."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._reducer.set_passes_per_step(passes)

    def step(self, closure: Any = None) -> Any:
        if self._synchronizes:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        self._opt_called = True  # what LR schedulers look at
        loss = super().step(closure)
        self._after_step()
        return loss

    # A scheduler is not to put its own `step` in the place of this one.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._reducer.forget()
        self._is_synchronized = False
        super().load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._reducer.is_under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)


class _DistributedDeltas(torch.optim.Optimizer):
    """Joins by Adasum what each rank's own step has changed, rather than its gradients."""

    _names: dict[Parameter, str]
    _compression: type[Compressor]
    _after_step: Callable[[], None] = staticmethod(_nothing)

    def step(self, closure: Any = None) -> Any:
        # Ranks may have used different parts of the model: a part that was not used has changed by nothing.
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        loss = super().step(closure)
        with torch.no_grad():
            deltas = [parameter - start for parameter, start in zip(trained, before, strict=True)]
            compressed = [self._compression.compress(delta) for delta in deltas]
            handles = [
                reduce_async(
                    ALLREDUCE,
                    [delta.contiguous()],
                    [None],
                    name=f"delta.{self._names[parameter]}",
                    op=Adasum,
                    prescale=1.0,
                    postscale=1.0,
                    process_set=global_process_set,
                )
                for parameter, (delta, _) in zip(trained, compressed, strict=True)
            ]
            for parameter, start, handle, (_, context) in zip(trained, before, handles, compressed, strict=True):
                parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
        self._after_step()
        return loss

    def synchronize(self) -> None:
        """Nothing is under way before `step`."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, which steps with reduced gradients from here on.

    Args:
        named_parameters: the model's; without it, parameters are named by their places.
        backward_passes_per_step: backward passes whose gradients are added up before they are reduced.
        gradient_predivide_factor: with Average, divide by this before the sum over ranks and by the rest after it.
        groups: parameters whose gradients are reduced together, or how many groups to make of all.

    Raises:
        ValueError: names are missing or come twice, or an argument has no meaning with the others.
    """
    if isinstance(optimizer, _Distributed | _DistributedDeltas):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = groups if groups is not None else num_groups
    names = _names(optimizer, named_parameters)
    own = type(optimizer)
    made: Any = optimizer
    made.__class__ = type(own.__name__, (_DistributedDeltas if op == Adasum else _Distributed, own), {})
    vars(made).pop("step", None)  # by which a scheduler that was made before has replaced the class's own
    made._parameter_names = names
    recorder = basics.recorder()
    if recorder is not None and recorder.follow(list(names)):
        made._after_step = recorder.step
    if op == Adasum:
        if backward_passes_per_step != 1 or groups or sparse_as_dense or process_set is not global_process_set:
            raise ValueError(
                "backward_passes_per_step, groups, sparse_as_dense and process_set have no effect with op=Adasum: it "
                "joins what steps have changed"
            )
        made._names, made._compression = names, compression
        return made
    prescale = postscale = 1.0
    if gradient_predivide_factor != 1.0:
        size = process_set.size()
        assert size is not None
        op, prescale, postscale = Sum, 1.0 / gradient_predivide_factor, gradient_predivide_factor / size
    made._synchronizes, made._is_synchronized = True, False
    made._reducer = Reducer(
        names,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        prescale=prescale,
        postscale=postscale,
        groups=_groups(names, groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return made


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Parameter, str]:
    """Every parameter's name. Raises ValueError if names are no strings, come twice or are missing."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return {parameter: f"allreduce.noname.{number}" for number, parameter in enumerate(parameters)}
    given = list(named_parameters)
    if any(not isinstance(each, tuple) for each in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    by_parameter = {id(parameter): name for name, parameter in given}
    missing = [position for position, parameter in enumerate(parameters) if id(parameter) not in by_parameter]
    if missing:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {len(missing)} of the "
            f"optimizer's {len(parameters)}, the first at place {missing[0]}"
        )
    return {parameter: by_parameter[id(parameter)] for parameter in parameters}


def _groups(names: dict[Parameter, str], groups: int | Sequence[Sequence[Tensor]] | None) -> list[list[Parameter]]:
    """The groups that are asked for. Raises ValueError if they are neither a number nor lists of parameters."""
    if groups is None:
        return []
    trained = [parameter for parameter in names if parameter.requires_grad]
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of list of parameters")
        return [list(part) for part in _split(trained, groups)] if groups else []
    known = {id(parameter): parameter for parameter in trained}
    return [[known[id(each)] for each in group if id(each) in known] for group in groups]


def _split(parameters: list[Parameter], count: int) -> list[list[Parameter]]:
    """As evenly as can be, in order."""
    count = min(count, len(parameters))
    least, more = divmod(len(parameters), count)
    ends = [(number + 1) * least + min(number + 1, more) for number in range(count)]
    return [parameters[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _make_sparse(parameter: Parameter) -> None:
    parameter.grad = _gradient(parameter).to_sparse(1)


def _gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
