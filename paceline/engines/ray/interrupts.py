"""Ctrl-C and SIGTERM: when they are raised, and what they are raised as."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import final

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class Interrupted(KeyboardInterrupt):
    """A run was ended by the user; the message says what is left of it and how to go on.

    Args:
        directory: of the run's results.
        iteration: of the checkpoint there, where that is known.
        how: it goes on, where the script has checkpoints of its own.
        has_begun: whether the run knows that it trains. Before, and in a loop that it knows nothing of, it cannot know
            whether the script has checkpoints of its own.
    """

    def __init__(self, directory: Path, iteration: int | None = None, *, how: str = "", has_begun: bool = True) -> None:
        from paceline.checkpoint import FILE_NAME as CHECKPOINT_FILE  # here, because it loads torch

        self.directory, self.iteration = directory, iteration
        if how:
            super().__init__(f"interrupted; {how}")
            return
        if not (directory / CHECKPOINT_FILE).exists():
            super().__init__(
                f"interrupted before anything was saved; {directory} has no checkpoint to resume from"
                if has_begun
                else f"interrupted before any step that the run knows of; give the same command again, with another "
                f"--out than {directory}"
            )
            return
        where = "" if iteration is None else f" at iteration {iteration}"
        remedy = f"the same command with --resume {directory} goes on from there, in Python resume={str(directory)!r}"
        super().__init__(f"interrupted; saved{where} in {directory}: {remedy}")


@final
class Insisted(KeyboardInterrupt):
    """The user has interrupted again while a first interrupt was held back."""


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it starts; give it back to whoever had it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def hold_back_interrupts(*, patience: float = math.inf) -> Iterator[None]:
    """Let what must be done be done: interrupts that come inside are raised at its end.

    Args:
        patience: how many are held back; the next one is raised at once, as `Insisted`, and they are dropped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, _: object) -> None:
        arrived.append(number)
        if len(arrived) > patience:
            raise Insisted

    handlers = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    except Insisted:
        arrived.clear()
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


@contextlib.contextmanager
def note_interrupts(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` whenever an interrupt comes, before its handler raises anything.

    What a handler raises is lost where Python has nobody to pass it to, as in a finalizer or a function that C calls.
    Who has noted the interrupt can raise it again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {int(number): signal.getsignal(number) for number in _SIGNALS}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}  # others run no Python

    def pass_on(number: int, frame: FrameType | None) -> None:
        note()
        handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
