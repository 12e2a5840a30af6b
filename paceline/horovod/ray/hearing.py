"""What workers say by `ray_logger.log`, to the callbacks of the caller."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.util.queue import Empty, Queue

_HEAR_S = 0.1
Callback = Callable[[Any], Any]


@contextmanager
def hearing(callbacks: "Sequence[Callback] | None") -> Iterator[Any]:
    """A queue for the workers, whose every value each callback is called with; none without callbacks. At the end
    they are called with all that has been said by then. Raises what a callback has raised."""
    if not callbacks:
        yield None
        return
    queue: Any = Queue(actor_options={"num_cpus": 0})
    is_over, errors = threading.Event(), list[Exception]()

    def hear() -> None:
        while True:
            is_last = is_over.is_set()
            try:
                said = queue.get(timeout=_HEAR_S)
            except Empty:
                if is_last:
                    return
                continue
            try:
                for callback in callbacks:
                    callback(said)
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=hear, name="paceline callbacks", daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        is_over.set()
        thread.join()
        queue.shutdown(force=True)
    if errors:
        raise errors[0]
