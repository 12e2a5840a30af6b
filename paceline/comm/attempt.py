"""A wait that can be ended from outside, for a call that nobody can end."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, final

from paceline.comm.exit_wait import start_thread

T = TypeVar("T")
_LOOK_S = 0.05


def attempt(make: Callable[[], T], *, check: Callable[[], None], drop: Callable[[T], object]) -> T:
    """Return what `make` returns, or raise what it raises. Another thread calls `make`, and this one waits for it.

    Args:
        make: blocks, and ends by itself at some time.
        check: called again and again meanwhile. If it raises, so does this call, without waiting any longer.
        drop: given what `make` has returned and this call does not, by whichever thread has it.
    """
    call = _Call(make, drop)
    start_thread(call.serve, name="paceline-attempt")
    try:
        while not call.is_over.wait(_LOOK_S):
            check()
        return call.result()
    except BaseException as why:
        try:
            call.give_up()
        finally:
            raise why  # not what dropping raises


@final
class _Call(Generic[T]):
    def __init__(self, make: Callable[[], T], drop: Callable[[T], object]) -> None:
        self.is_over = threading.Event()
        self._make, self._drop = make, drop
        self._lock = threading.Lock()
        self._is_given_up = False
        self._made: list[T] = []
        self._error: BaseException | None = None

    def serve(self) -> None:
        made: list[T] = []
        failure: BaseException | None = None
        try:
            made.append(self._make())
        except BaseException as error:
            failure = error
        with self._lock:
            if not self._is_given_up:
                self._made, self._error = made, failure
                made = []
        del failure  # its frames hold this one, and with it what was made in them
        for late in made:
            self._drop(late)
        self.is_over.set()

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            made, self._made, self._error = self._made, [], None
        for late in made:
            self._drop(late)

    def result(self) -> T:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else this frame and the error hold each other
        (made,) = self._made
        return made
