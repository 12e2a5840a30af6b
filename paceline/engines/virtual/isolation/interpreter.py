"""State of the interpreter and of torch that each script takes for its own, though all share one thread."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.engines.virtual.isolation.random_state import RandomState

_AUTOCAST_DEVICES = ("cpu", "cuda")

Modes = tuple[Any, ...]
"""What `with` blocks of torch set: gradients on or off, a look for anomalies, and automatic mixed precision."""


def modes() -> Modes:
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES]
    looks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    return torch.is_grad_enabled(), looks, *autocast


def set_modes(modes: Modes) -> None:
    wants_gradients, looks, *autocast = modes
    torch._C._set_grad_enabled(wants_gradients)
    torch.set_anomaly_enabled(*looks)
    for device, (is_on, dtype) in zip(_AUTOCAST_DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(device, is_on)
        torch.set_autocast_dtype(device, dtype)


@contextmanager
def kept() -> Iterator[None]:
    """Put back at the end what scripts change of the process: arguments, paths, directory, random generators."""
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
    """`time.sleep` asks `sleep`, which takes virtual time, and sleeps itself where that returns false."""
    real = time.sleep

    def either(duration_s: float, /) -> None:
        if not sleep(duration_s):
            real(duration_s)

    time.sleep = either  # type: ignore[assignment]
    try:
        yield
    finally:
        time.sleep = real
        sleep = _never  # modules imported meanwhile may have kept `either`, and must not keep the run


def _never(duration_s: float) -> bool:
    return False


@contextmanager
def interrupts(note: Callable[[], None]) -> Iterator[None]:
    """Call `note`, which may raise, for Ctrl-C and SIGTERM, instead of raising them wherever a script is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, lambda *_: note()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
