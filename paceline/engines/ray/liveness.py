"""Which processes of this host have ended, known at once, and what the dead leave behind."""

import contextlib
import ctypes
import os
import re
import select
import signal
import threading
from pathlib import Path
from typing import final

import psutil

RUN_VARIABLE = "PACELINE_RUN"
"""Environment variable by which processes that a run's scripts start are known."""
_PR_SET_PDEATHSIG = 1
_VMSTAT = Path("/proc/vmstat")


@final
class Watch:
    """Watches processes of this host.

    Ray learns of a death from a closed socket, which children that the dead process forked may hold open.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._names: dict[int, str] = {}

    def add(self, name: str, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return  # gone already, as Ray will tell
        self._names[descriptor] = name
        self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[str]:
        """The processes that have ended since the last call."""
        names = []
        for descriptor, _ in self._poll.poll(0):
            self._poll.unregister(descriptor)
            os.close(descriptor)
            names.append(self._names.pop(descriptor))
        return names

    def close(self) -> None:
        for descriptor in self._names:
            os.close(descriptor)
        self._names.clear()


@final
class MemoryKills:
    """Whether the kernel has ended processes of this host for lack of memory."""

    def __init__(self) -> None:
        self._number = _num_memory_kills()

    def told_since(self) -> str:
        """Words to go on with, where that has happened since the last call."""
        before, self._number = self._number, _num_memory_kills()
        told = ", and the kernel has ended processes of the launcher's host for lack of memory"
        return told if self._number > before else ""


def _num_memory_kills() -> int:
    """Processes that were killed for memory since the host began."""
    found = re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text() if _VMSTAT.exists() else "", re.MULTILINE)
    return int(found[1]) if found else 0


def end_with_forker(pid: int) -> None:
    """In a fork: have the kernel end this process when the thread that forked it ends, which is of process `pid`."""
    _bind_to_forker(ctypes.CDLL(None, use_errno=True))
    if os.getppid() != pid:  # it has ended before
        os.kill(os.getpid(), signal.SIGKILL)


def _bind_to_forker(libc: ctypes.CDLL) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def bind_forks_to_this_process() -> None:
    """Have children that the main thread forks from here on, such as a DataLoader's, end with this process.

    The kernel ends them when the thread that forked them ends, so only the main thread's can be bound.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    is_main = False

    def before() -> None:
        nonlocal is_main
        is_main = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if is_main:
            _bind_to_forker(libc)

    os.register_at_fork(before=before, after_in_child=in_child)


def end_this_process() -> None:
    """End this process at once, with what it has started."""
    try:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def end_processes_of(run: str) -> None:
    """End what the scripts of a run started on this host and left running."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == run and process.pid != os.getpid():
                process.kill()
        except (psutil.Error, OSError):
            continue
