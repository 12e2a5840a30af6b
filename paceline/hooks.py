"""Hooks on a script's module that stay with it, whatever the script copies or saves; who hears of their errors; and how
to listen to calls of functions that tell nobody."""

import os
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from types import FrameType
from typing import Any, NamedTuple, final
from weakref import WeakMethod, WeakSet

import torch

from paceline.errors import PacelineError

Listener = Callable[[PacelineError], object]
_listener: ContextVar[WeakMethod[Listener] | None] = ContextVar("paceline_listener", default=None)
"""Who listens to the worker that runs here. Virtual workers have a context each."""


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


@final
class Listening:
    """Has workers hear of calls of a function that the whole process shares, while any of them listens: each of its
    own.

    Args:
        owner: what has the function as its attribute `name`.
        call: takes the call, and is given who listens, the function, and its arguments. Where several listen, the
            function is the next one's call.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._call = owner, name, call
        self._listening: WeakSet[Any] = WeakSet()
        self._own: Callable[..., Any] | None = None
        self._heard: Callable[..., Any] | None = None
        self._here: ContextVar[tuple[Any, ...]] = ContextVar(f"listening_to_{name}", default=())
        """Who listens here: virtual workers have a context each."""

    def add(self, listener: Any) -> None:
        others = (each for each in self._here.get() if each is not listener and each in self._listening)
        self._here.set((*others, listener))
        self._listening.add(listener)
        if self._own is not None:
            return
        self._own = own = getattr(self._owner, self._name)

        @wraps(own)
        def heard(*arguments: Any, **named: Any) -> Any:
            call = own
            for listener in self._here.get():
                if listener in self._listening:
                    call = partial(self._call, listener, call)
            return call(*arguments, **named)

        self._heard = heard
        setattr(self._owner, self._name, heard)

    def remove(self, listener: Any) -> None:
        self._listening.discard(listener)
        self._here.set(tuple(each for each in self._here.get() if each is not listener))
        if not self._listening and self._own is not None and getattr(self._owner, self._name) is self._heard:
            setattr(self._owner, self._name, self._own)
            self._own = None


def _listened_to(listener: Any, backward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return listener.look(backward, *arguments, **named)


backward_calls = Listening(torch.autograd, "backward", _listened_to)
"""Has the method `look` of who listens take the script's backward passes, given torch's own function and what the
script gives it."""

_PACKAGE = os.path.dirname(__file__)
_LAYERS = (os.path.join(_PACKAGE, name) for name in ("strategies", "training"))
_BENEATH = (__file__, *(os.path.join(path, "") for path in (os.path.dirname(torch.__file__), *_LAYERS)))


class Place(NamedTuple):
    """A line of a script."""

    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    def warn(self, message: str) -> None:
        """As if this line warned, for filters and for whoever reads it."""
        warnings.warn_explicit(message, UserWarning, self.file, self.line, module=self.module)


def place_in_script() -> Place:
    """The line that the script has come to: files of torch, and of what acts for the script in its steps, are passed
    over."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BENEATH):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "__main__"))


def _nothing(*_: object) -> None:
    return None


def _no_hook() -> Callable[..., None]:
    return _nothing
