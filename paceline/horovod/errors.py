"""Errors that Horovod's scripts know by name."""

from paceline.errors import PacelineError


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
