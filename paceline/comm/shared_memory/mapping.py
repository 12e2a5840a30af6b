"""Descriptors mapped into memory, each into a place of one range of addresses.

Python's own maps keep a copy of their descriptor, of which a process may have but a thousand.
"""

import ctypes
import mmap
import os

_FIXED, _NO_RESERVE, _FAILED = 0x10, 0x4000, ctypes.c_void_p(-1).value  # mmap(2), as Linux numbers them
_READ, _WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def address_range(num_bytes: int) -> mmap.mmap:
    """Reserve so many addresses; what is mapped into them is unmapped with them. Raises OSError if this process may
    have no more."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def map_into(area: mmap.mmap, fd: int, num_bytes: int, *, start: int = 0, is_written: bool) -> None:
    """Have memory of `fd` from that byte of the area on. Raises OSError.

    Args:
        is_written: by this process, too; else a write into it would kill the process.
    """
    place = ctypes.addressof(ctypes.c_char.from_buffer(area)) + start
    access = _WRITE if is_written else _READ
    if _mmap(place, num_bytes, access, mmap.MAP_SHARED | _FIXED, fd, 0) == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
