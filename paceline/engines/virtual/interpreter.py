"""What scripts believe to have for themselves, although all workers live in one thread of one process."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, final

import numpy as np
import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@final
class RandomState:
    """One worker's random generators and `__main__` module, while another worker runs."""

    def __init__(self) -> None:
        """As they are now."""
        self.save()

    def save(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()
        self._main: ModuleType | None = sys.modules.get("__main__")

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._main is not None:
            sys.modules["__main__"] = self._main


@final
class Modes:
    """What `with` blocks of torch set for a thread: whether gradients are wanted, and automatic mixed precision."""

    def __init__(self) -> None:
        """As they are now."""
        self.save()

    def save(self) -> None:
        self._wants_gradients = torch.is_grad_enabled()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        ]

    def restore(self) -> None:
        torch._C._set_grad_enabled(self._wants_gradients)
        for device, is_on, dtype in self._autocast:
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)


@contextmanager
def kept() -> Iterator[None]:
    """What scripts change of the process is as before afterwards: arguments, paths, directory, random generators."""
    state = RandomState()
    arguments, paths, directory = sys.argv, list(sys.path), os.getcwd()
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, paths
        os.chdir(directory)
        state.restore()


@contextmanager
def sleeping(sleep: Callable[[float], bool]) -> Iterator[None]:
    """`time.sleep` takes virtual time where that is the caller's.

    Args:
        sleep: takes it, in seconds; false: the caller lives in real time.
    """
    real = time.sleep

    def either(duration_s: float, /) -> None:
        if not sleep(duration_s):
            real(duration_s)

    time.sleep = either  # type: ignore[assignment]
    try:
        yield
    finally:
        time.sleep = real


@contextmanager
def interrupts(note: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are told to `note`, which may raise, instead of being raised wherever a script is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, lambda *_: note()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
