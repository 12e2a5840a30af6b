"""What scripts believe to have for themselves, although all workers live in one thread of one process."""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char
from types import ModuleType
from typing import Any, final

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

_AUTOCAST_DEVICES = ("cpu", "cuda")
_TWISTER_BYTES = 4 * (624 + 1)
"""Of a Mersenne Twister: its numbers, and where it is among them."""


@final
class _NumpyState:
    """State of numpy's global generator.

    Right after a gradient, when its code is in no cache, numpy takes 70 us to say what its state is and as long to take
    it back. So memory is compared, and numpy asked only where numbers have been drawn; the generator's own is copied
    back, and numpy told only where the second one of a pair of Gaussians is held, which is kept elsewhere.
    """

    def __init__(self) -> None:
        """As it is now."""
        self._content: bytes | None = None
        self.save()

    def save(self) -> None:
        content = _numpy_content()
        if content is None or content != self._content:
            self._whole = np.random.get_state(legacy=False)
            self._content = content

    def restore(self, present: _NumpyState | None) -> None:
        """
        Args:
            present: what is in place, just saved; none where that is not known.
        """
        was_all = present is not None and present._memory_alone is not None
        if was_all and (content := self._memory_alone) is not None:
            _memory_of(get_bit_generator())[:] = content
        else:
            np.random.set_state(self._whole)

    @property
    def _memory_alone(self) -> bytes | None:
        """The generator's memory, where there is nothing else to the state."""
        return None if self._content is None or self._whole["has_gauss"] else self._content[:_TWISTER_BYTES]


def _numpy_content() -> bytes | None:
    """The memory of numpy's generator, if it is the one that numpy comes with, and of the Gaussian that may be held."""
    generator, gaussian = get_bit_generator(), _gaussian_memory()
    if type(generator) is not np.random.MT19937 or gaussian is None:
        return None
    return bytes(_memory_of(generator)) + bytes(gaussian)


@functools.lru_cache(maxsize=1)
def _memory_of(generator: np.random.BitGenerator) -> memoryview:
    return _memory(generator.ctypes.state_address, _TWISTER_BYTES)


@functools.cache
def _gaussian_memory() -> memoryview | None:
    """Where numpy keeps whether it holds a Gaussian, and which, if that is where every numpy so far has had it.

    Numpy does not say where, so a known number is given to another generator of the kind, and looked for in it.
    """
    known = np.random.RandomState(0)
    known.set_state({**known.get_state(legacy=False), "has_gauss": 1, "gauss": math.pi})
    held = struct.pack("@id", 1, math.pi)
    place = bytes(_memory(id(known), type(known).__basicsize__)).find(held)
    return _memory(id(np.random.mtrand._rand) + place, len(held)) if place >= 0 else None


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((c_char * num_bytes).from_address(address)).cast("B")


@final
class RandomState:
    """One worker's random generators and `__main__` module, while another worker runs."""

    def __init__(self) -> None:
        """As they are now."""
        self._numpy = _NumpyState()
        self.save()

    def save(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy.save()
        self._python = random.getstate()
        self._main: ModuleType | None = sys.modules.get("__main__")

    def restore(self, present: RandomState | None = None) -> None:
        """
        Args:
            present: what is in place, just saved; none where that is not known.
        """
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        self._numpy.restore(present and present._numpy)
        random.setstate(self._python)
        if self._main is not None:
            sys.modules["__main__"] = self._main


Modes = tuple[Any, ...]
"""What `with` blocks of torch set for a thread: whether gradients are wanted, and automatic mixed precision."""


def modes() -> Modes:
    """As they are now."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES]
    return torch.is_grad_enabled(), *autocast


def set_modes(modes: Modes) -> None:
    wants_gradients, *autocast = modes
    torch._C._set_grad_enabled(wants_gradients)
    for device, (is_on, dtype) in zip(_AUTOCAST_DEVICES, autocast, strict=True):
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
