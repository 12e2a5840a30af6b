"""What workers say to the callbacks of the caller: `from horovod.ray import ray_logger; ray_logger.log({...})`."""

import warnings
from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """Send what is logged in this process into a Ray queue; None: nowhere."""
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Have each callback called with this. Without callbacks nothing is sent, and a warning says so."""
    if _queue is None:
        warnings.warn("nobody listens: give run or execute callbacks", stacklevel=2)
        return
    _queue.put(info_dict)
