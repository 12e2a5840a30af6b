"""Does what a script, or a library of its own, leaves to the end of its process. Ray would do none of it."""

import atexit
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, final


@contextmanager
def done_with_script(of_process: Iterable[str]) -> Iterator[None]:
    """Collects the functions that are registered meanwhile, and calls them at the end.

    As in Python, the last one registered is called first. One that raises is told, and the others are called all the
    same.

    Args:
        of_process: modules that the process had loaded before it knew of a script. It needs their packages, and the
            standard library, to its own end: functions that these register are left to it.
    """
    register, unregister = atexit.register, atexit.unregister
    asked = _Asked(register, unregister, _packages(of_process))
    atexit.register, atexit.unregister = asked.register, asked.unregister
    try:
        yield
    finally:
        try:
            asked.do()
        finally:
            atexit.register, atexit.unregister = register, unregister


@contextmanager
def closed_after_script(of_process: Iterable[str]) -> Iterator[None]:
    """Does at the end what Python itself does last of all: calls the finalizers that the script has made meanwhile and
    that have not been called, then flushes and closes logging handlers that were made meanwhile; the newest first.

    Args:
        of_process: as of `done_with_script`; finalizers that their packages make are left to the process.
    """
    finalize, packages, handlers = weakref.finalize, _packages(of_process), [*logging._handlerList]  # type: ignore[attr-defined]
    weakref.finalize = _Finalizer  # type: ignore[misc]
    try:
        yield
    finally:
        while left := [each for each in _finalizers() if each.atexit and each.maker not in packages]:
            _call(left[-1])
        weakref.finalize = finalize  # type: ignore[misc]
        for handler in reversed([*logging._handlerList]):  # type: ignore[attr-defined]
            if handler not in handlers:
                _call(partial(logging.shutdown, [handler]))


@final
class _Asked:
    def __init__(
        self, register: Callable[..., Any], unregister: Callable[[Any], None], packages: Collection[str]
    ) -> None:
        self._register, self._unregister, self._packages = register, unregister, packages
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def register(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Callable[..., Any]:
        if _package_of(sys._getframe(1)) in self._packages:
            self._register(function, *given, **named)
        else:
            self._calls.append((function, given, named))
        return function

    def unregister(self, function: Callable[..., Any], /) -> None:
        self._unregister(function)
        self._calls[:] = [call for call in self._calls if call[0] != function]

    def do(self) -> None:
        while self._calls:
            function, given, named = self._calls.pop()
            _call(function, *given, **named)


class _Finalizer(weakref.finalize):  # type: ignore[type-arg]
    """Knows whose package has made it. The standard library makes some for its callers, such as those of temporary
    directories."""

    __slots__ = ("maker",)

    def __init__(self, thing: Any, function: Callable[..., Any], /, *given: Any, **named: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and _package_of(frame) in sys.stdlib_module_names:
            frame = frame.f_back
        self.maker = _package_of(frame)
        super().__init__(thing, function, *given, **named)


def _finalizers() -> list[_Finalizer]:
    """Those that wait, the oldest first."""
    return [each for each in weakref.finalize._registry if isinstance(each, _Finalizer)]  # type: ignore[attr-defined]


def _packages(modules: Iterable[str]) -> set[str]:
    """The process's own, which are those of the standard library, too."""
    return {*sys.stdlib_module_names, *(name.partition(".")[0] for name in modules)} - {"__main__"}


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _call(function: Callable[..., Any], /, *given: Any, **named: Any) -> None:
    """What it raises is told, but for the end that it may ask for, which comes anyway."""
    try:
        function(*given, **named)
    except SystemExit:
        pass
    except Exception:
        print(f"Exception ignored in what is done at exit, {function!r}:", file=sys.stderr)
        traceback.print_exc()
