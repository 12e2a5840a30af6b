"""What a script has Python do when it ends (`atexit`): loggers send the rest so, and writers close their files."""

import atexit
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final


@contextmanager
def done_with_script(of_process: Iterable[str]) -> Iterator[None]:
    """Meanwhile, what is to be done at exit is noted, and done at the end: Ray ends workers without it.

    As in Python, what was asked for last is done first, and what raises is told and keeps nobody from the rest.

    Args:
        of_process: modules that the process had loaded before it knew of a script. What they and others of their
            packages ask for, and the standard library, the process needs to its own end, and so is not done here.
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
