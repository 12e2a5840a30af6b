"""torch's compiler, loaded once something is to be compiled.

torch loads it with the first optimizer of a process, for 1.4 s of a core, since the methods of optimizers tell it to
leave them alone. As long as nobody else has loaded it, there is nobody to tell.
"""

import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, final

import torch
from torch.optim import Optimizer

_COMPILER = "torch._dynamo"
_UNTOLD = "__dynamo_disable"  # where torch keeps what it calls in a method's place, made by the compiler


def load_compiler_late() -> None:
    """Have optimizers do without torch's compiler until something imports it, which gives all of torch its own code
    back. Where it is loaded, and with a torch that is written otherwise, nothing changes."""
    if _COMPILER not in sys.modules and not any(isinstance(finder, _Restorer) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Restorer())


@final
class _Restorer(MetaPathFinder):
    """Finds no module. It is asked for the compiler before anybody loads it."""

    def __init__(self) -> None:
        self._steps = [(step, step.__code__) for step in _steps()]
        self._methods = list(_methods())
        for step, _ in self._steps:
            step.__code__ = _alone(None).__code__
        for method in self._methods:
            setattr(method, _UNTOLD, method)

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname == _COMPILER:
            self._restore()
        return None

    def _restore(self) -> None:
        for step, code in self._steps:
            step.__code__ = code
        for method in self._methods:
            vars(method).pop(_UNTOLD, None)
        self._steps, self._methods = [], []


def _alone(func: Any) -> Callable[..., Any]:
    """What torch's `_use_grad_for_differentiable` makes of a step, without what it says to the compiler."""

    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        previous = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(previous)

    return _use_grad


def _steps() -> Iterator[Any]:
    """Steps that load the compiler, below what torch may have wrapped around them since."""
    optimizers: Any = sys.modules[Optimizer.__module__]  # which torch.optim does not show
    decorate = getattr(optimizers, "_use_grad_for_differentiable", None)
    code = getattr(decorate and decorate(_alone), "__code__", None)
    if code is None or code.co_freevars != _alone(None).__code__.co_freevars:
        return
    for kind in {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}:
        step = vars(kind).get("step")
        while step is not None and getattr(step, "__code__", None) is not code:
            step = getattr(step, "__wrapped__", None)
        if step is not None:
            yield step


def _methods() -> Iterator[Any]:
    """Methods of optimizers that torch has made to load the compiler when they are first called."""
    code = torch._disable_dynamo(_alone).__code__
    for method in vars(Optimizer).values():
        if getattr(method, "__code__", None) is code and not hasattr(method.__wrapped__, _UNTOLD):
            yield method.__wrapped__
