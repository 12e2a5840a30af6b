"""Errors, as `horovod.common.exceptions` has them."""

from paceline.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
