"""Large packages, loaded without Python's collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile. As torch is loaded, the collector would look through all that is there again and
    again, and find little: 0.2 to 0.4 s of a core in 2.2."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
