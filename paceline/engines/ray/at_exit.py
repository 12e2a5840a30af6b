"""Runs the functions that a script, or a library of its own, registers with `atexit`. Ray would run none of them."""

import atexit
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
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
    packages = {*sys.stdlib_module_names, *(name.partition(".")[0] for name in of_process)} - {"__main__"}
    asked = _Asked(register, unregister, packages)
    atexit.register, atexit.unregister = asked.register, asked.unregister
    try:
        yield
    finally:
        try:
            asked.do()
        finally:
            atexit.register, atexit.unregister = register, unregister


@final
class _Asked:
    def __init__(
        self, register: Callable[..., Any], unregister: Callable[[Any], None], packages: Collection[str]
    ) -> None:
        self._register, self._unregister, self._packages = register, unregister, packages
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def register(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Callable[..., Any]:
        asker = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        if asker in self._packages:
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
            try:
                function(*given, **named)
            except SystemExit:
                pass
            except Exception:
                print(f"Exception ignored in what is done at exit, {function!r}:", file=sys.stderr)
                traceback.print_exc()
