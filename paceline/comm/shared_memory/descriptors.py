"""Opening what another process of this host has open, if it is still what that process announced."""

import os

from paceline.errors import PeerLost


def open_descriptor(pid: int, fd: int, *, link: str, flags: int) -> int:
    """A descriptor of this process for what another one has open as `fd`.

    Args:
        link: what /proc says that the descriptor refers to. Numbers of processes and descriptors are used again, for
            other processes and files.
        flags: as of os.open.

    Raises:
        PeerLost: the process is gone, has closed it or has something else there, or runs on another host or in another
            PID namespace.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opens nothing yet: what else it may be is left alone
        try:
            own = f"/proc/self/fd/{found}"
            if os.readlink(own) != link:
                raise PeerLost(f"{path} is no longer what process {pid} announced")
            return os.open(own, flags | os.O_CLOEXEC)
        finally:
            os.close(found)
    except OSError as error:
        raise PeerLost(
            f"cannot open what process {pid} shares: {error.strerror}; "
            "the process must be alive, on this host, in the same PID namespace and of the same user"
        ) from None
