"""Blocking on a 32-bit word of shared memory until another process changes it: Linux futexes (futex(2)).

Whoever sees a word must also see the data written before it. On x86 stores become visible in program order and loads
are not reordered (Intel SDM 3A, section 9.2), so plain accesses suffice. Elsewhere `fence` makes a foreign call, around
which the interpreter releases and acquires its lock, and no access crosses both.
"""

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Callable

_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: waiter and waker are different processes
_EVERYONE = 2**31 - 1
_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98}
_MEMBARRIER_NUMBERS = {"x86_64": 324, "aarch64": 283}
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 1 << 1, 1 << 2
_EXPECTED_ERRORS = (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)  # changed already; too late; a signal arrived
_SLEEP_S = 200e-6

_machine = platform.machine()
_is_known = sys.platform == "linux" and sys.maxsize > 2**32
_number = _SYSCALL_NUMBERS.get(_machine) if _is_known else None
_membarrier_number = _MEMBARRIER_NUMBERS.get(_machine) if _is_known else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
)


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the aligned 32-bit word at `address` holds `expected`, for at most `timeout_s` seconds.

    May return early for no reason: the caller looks again. Where futexes are not known it sleeps a moment instead.

    Raises:
        OSError: the address is not readable or not a multiple of 4.
    """
    if _number is None:
        time.sleep(min(timeout_s, _SLEEP_S))
        return
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    if _syscall(_number, address, _WAIT, expected, ctypes.byref(timeout), None, 0) < 0:
        code = ctypes.get_errno()
        if code not in _EXPECTED_ERRORS:
            raise OSError(code, f"futex wait: {os.strerror(code)}")


def wake(address: int) -> None:
    """Wake every process that waits for the word at `address`. A system call, whether anyone waits or not."""
    if _number is not None:
        _syscall(_number, address, _WAKE, _EVERYONE, None, None, 0)


def may_skip_wakes() -> bool:
    """Join those whose stores `flush_others` makes visible; whether that is possible here."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def flush_others() -> bool:
    """Make all that joined processes have stored visible, and have them see what this one has; whether that worked.

    This is the rare side of an asymmetric fence (membarrier(2)). A process about to sleep says so in a word, calls
    this and looks once more at what it waits for. A process with news reads that word without a fence, and saves the
    wake if nobody sleeps: right after a training step, whose code is in no cache, a wake takes 25 us.
    """
    return _membarrier(_GLOBAL_EXPEDITED)


def _membarrier(command: int) -> bool:
    return _membarrier_number is not None and _syscall(_membarrier_number, command, 0, 0, None, None, 0) == 0


fence: Callable[[], object] = object if _machine in ("x86_64", "AMD64") else _libc.getppid
"""To be called between data and the word that publishes it, on both sides; on x86 anything that runs no Python."""
