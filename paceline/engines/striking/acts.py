"""What strikes a process by a signal, or by what it lacks."""

import ctypes
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import psutil

HELD_S, PAUSED_S = 30, 1
_MORE_BYTES = 1 << 28


def signalled(number: signal.Signals) -> Callable[[Path], AbstractContextManager[None]]:
    def send(folder: Path) -> AbstractContextManager[None]:
        os.kill(os.getpid(), number)
        return nullcontext()

    return send


def hold_interpreter(folder: Path) -> AbstractContextManager[None]:
    ctypes.PyDLL(None).sleep(HELD_S)
    return nullcontext()


def no_more_memory(folder: Path) -> AbstractContextManager[None]:
    """Raises MemoryError: its address space cannot grow any more, and it asks for more."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms, limit))
    bytearray(_MORE_BYTES)
    return nullcontext()


def pause(folder: Path) -> AbstractContextManager[None]:
    """It is stopped, and goes on a second later."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSED_S}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return nullcontext()


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """The largest file of the result directory, its checkpoint, cannot be written again while the place is being
    called: this process's files end at half of its size, with another of the system's errors than on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in (folder / "out").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
