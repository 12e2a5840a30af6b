"""A worker's random generators, and its `__main__`, while another one runs in the same process."""

import functools
import math
import random
import struct
import sys
from ctypes import c_char
from types import ModuleType
from typing import Any, final

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind `random.random` and the like."""
_TWISTER_BYTES = 4 * (624 + 1)
"""Size of a Mersenne Twister's state: its 624 numbers and its position among them."""


@final
class _NumpyState:
    """State of numpy's global generator.

    Right after a gradient, which has emptied the caches, numpy takes 70 us to give its state and 70 us to take it back.
    So the generator's memory is compared, and numpy is asked only where numbers have been drawn. The memory is copied
    back, and numpy takes the state only where it holds the second of a pair of Gaussians, which lies elsewhere.
    """

    def __init__(self) -> None:
        self._content: tuple[bytes, bytes] | None = None
        self.save()

    def save(self) -> None:
        memory = _numpy_memory(get_bit_generator())
        content = memory and (bytes(memory[0]), bytes(memory[1]))
        if content is None or content != self._content:
            self._whole = np.random.get_state(legacy=False)
            self._content = content
            # The generator's memory where that is the whole state, else none.
            self._numbers = None if content is None or self._whole["has_gauss"] else content[0]

    def restore(self, present: "_NumpyState | None") -> None:
        """`present`: the state in place, just saved; none where that is not known."""
        if self._numbers is not None and present is not None and present._numbers is not None:
            memory = _numpy_memory(get_bit_generator())
            assert memory is not None, "present was saved from it"
            memory[0][:] = self._numbers
        else:
            np.random.set_state(self._whole)


@functools.lru_cache(maxsize=1)
def _numpy_memory(generator: np.random.BitGenerator) -> tuple[memoryview, memoryview] | None:
    """The memory of numpy's generator and of the Gaussian that it may hold; none where they are not found."""
    gaussian = _gaussian_memory()
    if type(generator) is not np.random.MT19937 or gaussian is None:
        return None
    return _memory(generator.ctypes.state_address, _TWISTER_BYTES), gaussian


def _gaussian_memory() -> memoryview | None:
    """Where numpy keeps whether it holds a Gaussian, and which; none where it is not found.

    Numpy does not say where, so a known number is given to another generator and looked for in its memory.
    """
    known = np.random.RandomState(0)
    known.set_state({**known.get_state(legacy=False), "has_gauss": 1, "gauss": math.pi})
    held = struct.pack("@id", 1, math.pi)
    place = bytes(_memory(id(known), type(known).__basicsize__)).find(held)
    return _memory(id(np.random.mtrand._rand) + place, len(held)) if place >= 0 else None


@final
class _PythonState:
    """State of Python's global generator.

    Its memory is copied, and the Gaussian that it may hold. That saves 50 us each time that workers change, against 625
    Python integers out and back.
    """

    def __init__(self) -> None:
        self.save()

    def save(self) -> None:
        memory = _python_memory()
        self._state: Any = random.getstate() if memory is None else (bytes(memory), _PYTHON.gauss_next)

    def restore(self) -> None:
        memory = _python_memory()
        if memory is None:
            random.setstate(self._state)
        else:
            memory[:], _PYTHON.gauss_next = self._state


@functools.cache
def _python_memory() -> memoryview | None:
    """The memory of the numbers of Python's generator, and its place among them; none where it is not found."""
    *numbers, place = _PYTHON.getstate()[1]
    content = _memory(id(_PYTHON), type(_PYTHON).__basicsize__)
    start = bytes(content).find(struct.pack("@i624I", place, *numbers))
    return content[start : start + _TWISTER_BYTES] if start >= 0 else None


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((c_char * num_bytes).from_address(address)).cast("B")


@final
class RandomState:
    """One worker's random generators and `__main__` module, while another worker runs."""

    def __init__(self) -> None:
        self._numpy, self._python = _NumpyState(), _PythonState()
        self.save()

    def save(self) -> None:
        # Its own method takes 3 us, and torch.set_rng_state 11 us.
        self._torch = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy.save()
        self._python.save()
        self._main: ModuleType | None = sys.modules.get("__main__")

    def restore(self, present: "RandomState | None" = None) -> None:
        """`present`: the state in place, just saved; none where that is not known."""
        torch.default_generator.set_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        self._numpy.restore(present and present._numpy)
        self._python.restore()
        if self._main is not None:
            sys.modules["__main__"] = self._main
