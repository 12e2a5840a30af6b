"""A lock in shared memory that outlives its owner: a robust mutex of POSIX (pthread_mutexattr_setrobust(3))."""

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from typing import final

MUTEX_BYTES = 64  # sizeof(pthread_mutex_t) is 40 on x86-64 and 48 on aarch64
_ATTRIBUTE_BYTES = 64
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST

_libc = ctypes.CDLL(None)
_at_once = ctypes.PyDLL(None)
"""For what never waits: the interpreter's own lock stays with the caller, who might have to wait for that."""
IS_AVAILABLE = sys.platform == "linux" and hasattr(_libc, "pthread_mutex_consistent")


def prepare(address: int) -> None:
    """Make a free mutex of `MUTEX_BYTES` at this address, before anyone takes it."""
    attribute = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    _libc.pthread_mutexattr_init(attribute)
    _libc.pthread_mutexattr_setpshared(attribute, _SHARED)
    _libc.pthread_mutexattr_setrobust(attribute, _ROBUST)
    _require(_libc.pthread_mutex_init(ctypes.c_void_p(address), attribute), "init")


@final
class RobustMutex:
    """One process's handle. Who takes it after its owner was killed gets it as usual: what it guards must be whole at
    every moment."""

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def __enter__(self) -> None:
        code = _at_once.pthread_mutex_trylock(self._address)
        if code == errno.EBUSY:
            code = _libc.pthread_mutex_lock(self._address)
        if code == errno.EOWNERDEAD:
            code = _libc.pthread_mutex_consistent(self._address)
        if code:
            _require(code, "lock")

    def __exit__(self, *error: object) -> None:
        _at_once.pthread_mutex_unlock(self._address)


@contextlib.contextmanager
def all_of(mutexes: Sequence[RobustMutex]) -> Iterator[None]:
    """All of these at once. Whoever takes several takes them in the same order."""
    num_taken = 0
    try:
        for mutex in mutexes:
            mutex.__enter__()
            num_taken += 1
        yield
    finally:
        for mutex in mutexes[:num_taken]:
            mutex.__exit__()


def _require(code: int, what: str) -> None:
    if code:
        raise OSError(code, f"pthread_mutex_{what}: {os.strerror(code)}")
