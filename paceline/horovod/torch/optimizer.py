"""An optimizer whose gradients are reduced over all ranks while backward goes on."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.horovod import runtime as basics
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.requests import ALLREDUCE
from paceline.horovod.torch.compression import Compression, Compressor
from paceline.horovod.torch.operations import Adasum, Average, Sum, reduce_async, synchronize
from paceline.horovod.torch.reducer import Parameter, Reducer


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
                    (delta.contiguous(),),
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
    twice = [id(each) for group in groups for each in group]
    for parameter in trained:
        if twice.count(id(parameter)) > 1:
            raise ValueError(f"the parameter {names[parameter]!r} is in groups more than once")
    return [[known[id(each)] for each in group if id(each) in known] for group in groups]


def _split(parameters: list[Parameter], count: int) -> list[list[Parameter]]:
    """As evenly as can be, in order."""
    count = min(count, len(parameters))
    least, more = divmod(len(parameters), count)
    ends = [(number + 1) * least + min(number + 1, more) for number in range(count)]
    return [parameters[start:end] for start, end in zip([0, *ends], ends, strict=False)]
