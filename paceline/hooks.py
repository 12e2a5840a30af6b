"""Hooks on a script's module that stay with it, whatever the script copies or saves, and who hears of their errors."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, final
from weakref import WeakMethod

from paceline.errors import PacelineError

Listener = Callable[[PacelineError], object]
_listener: ContextVar[WeakMethod[Listener] | None] = ContextVar("paceline_listener", default=None)
"""Of the worker that runs here: virtual ones have a context each."""


def tell_errors_to(listener: Listener) -> None:
    """Have this method hear of what hooks that are made from here on raise into the script's own calls: the script may
    catch it and go on. Its object is not kept alive."""
    _listener.set(WeakMethod(listener))


@final
class Telling:
    """Tells an error to who listened where this was made. As a context, it tells the one that leaves it."""

    def __init__(self) -> None:
        self._listener = _listener.get()

    def __call__(self, error: PacelineError) -> None:
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener(error)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, PacelineError):
            self(error)


@final
class OwnHook:
    """A hook of this module alone: copies of the module, and what is unpickled of it, have one that does nothing.

    Without it `copy.deepcopy(model)` and `torch.save(model)` would take along what the hook's method belongs to.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self._tell = call, Telling()

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._call(*arguments)
        except PacelineError as error:
            self._tell(error)
            raise

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _no_hook, ()


def _nothing(*_: object) -> None:
    return None


def _no_hook() -> Callable[..., None]:
    return _nothing
