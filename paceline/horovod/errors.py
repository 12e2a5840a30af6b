"""Errors that Horovod's scripts know by name."""

from paceline.errors import PacelineError

FAILED = "Horovod detected that one or more processes exited with non-zero status"
"""The words that programs look for in the error of Horovod's launcher."""


def how_ended(status: int) -> str:
    """Args:
    status: of a process; a signal's number below zero.
    """
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


class HorovodInternalError(PacelineError, RuntimeError):
    """A collective operation failed: ranks do not agree on it, or one of them is gone."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed.

    Args:
        skip_sync: whether the state need not be brought to the others anew.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync
