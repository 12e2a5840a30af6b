"""torch's compiler, loaded when somebody compiles, and not with the first optimizer.

torch's optimizers tell `torch._dynamo` which of their functions it is to leave alone, and where a graph ends. That
means nothing before something is compiled, and to load it takes 1.4 s of a core in every process.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, final

import torch

_NAME = "torch._dynamo"


def put_off() -> None:
    """From now on something small stands in for the compiler, until anything else is asked of it. Where it is loaded
    already, nothing happens."""
    spec = PathFinder.find_spec(_NAME, torch.__path__)
    if _NAME in sys.modules or spec is None:
        return
    stand_in = module_from_spec(spec)
    stand_in.__class__ = _StandIn
    sys.modules[_NAME] = stand_in
    sys.meta_path.insert(0, _Parts(stand_in))


@final
class _StandIn(ModuleType):
    """Knows what optimizers ask of the compiler; whatever else it is asked, the compiler answers."""

    def graph_break(self) -> None:
        """There is no graph yet."""

    def disable(self, function: Any = None, recursive: bool = True, **more: Any) -> Any:
        """A function that the compiler leaves alone as soon as it is there, if torch itself asks for that: its own
        functions are called without a wrapper until then."""
        if more.get("wrapping") is not False:
            return _loaded(self).disable(function, recursive, **more)
        called = function

        def call(*args: Any, **named: Any) -> Any:
            return called(*args, **named)

        def settle(compiler: Any) -> None:
            nonlocal called
            called = compiler.disable(function, recursive, **more)

        _unsettled.append(settle)
        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules need not load one for that
            raise AttributeError(name)
        return getattr(_loaded(self), name)


_unsettled: list[Callable[[Any], None]] = []
_giving_way = threading.Lock()


def _loaded(stand_in: ModuleType) -> Any:
    """The compiler, in the place of what stood in for it; as far as it has come, where it is just being loaded."""
    with _giving_way:
        if sys.modules.get(_NAME) is stand_in:
            del sys.modules[_NAME]
            vars(torch).pop("_dynamo", None)
    compiler: Any = importlib.import_module(_NAME)
    while hasattr(compiler, "disable") and _unsettled:
        _unsettled.pop()(compiler)
    return compiler


@final
class _Parts(MetaPathFinder):
    """Loads the compiler before any of its parts, as `import` would if nothing stood in."""

    def __init__(self, stand_in: ModuleType) -> None:
        self._stand_in = stand_in

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}.") or name in sys.modules:
            return None
        _loaded(self._stand_in)
        return ModuleSpec(name, _Already(sys.modules[name])) if name in sys.modules else None


@final
class _Already(Loader):
    """Hands out a module that has been loaded meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
