"""Work at a place that may never answer: whoever waits for it sees when nothing moves any more."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar, final

from paceline.errors import UsageError

T = TypeVar("T")
_LOOK_S = 0.5


@final
class NoAnswer(UsageError):
    """Nothing has moved at a place for too long. What it was asked for may still be done when it moves again."""


@final
class Pulse:
    """When something moved last."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def beat(self) -> None:
        self._last_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._last_s


def awaited(work: Callable[[], T], pulse: Pulse, *, where: str, silent_s: float) -> T:
    """Do the work in a thread that does not keep the process from ending, and return what it returns.

    Raises:
        NoAnswer: nothing has moved there for so long.
        BaseException: as the work does.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    pulse.beat()
    Thread(target=run, name="paceline-awaited", daemon=True).start()
    while not wait([done], timeout=min(_LOOK_S, silent_s)).done:
        if pulse.silent_s > silent_s:
            raise NoAnswer(f"{where} has not answered for {silent_s:g} s")
    return done.result()
