"""Ray's start beside the imports that a run needs: either takes seconds, and neither waits for the other."""

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline import cli
from paceline.engines.ray.nodes import connected
from paceline.loading import uncollected

_HEAVY = "paceline.running.launch"


@contextmanager
def ray_beside_imports(*, engine: str, address: str | None, insecure: bool, num_workers: int) -> Iterator[None]:
    """Load torch and what a run needs of Paceline and, for the Ray engine, meanwhile connect to Ray, or start it.

    Where torch is loaded already, Ray is left to the run.

    Raises: as `connected`.
    """
    if engine != "ray" or "torch" in sys.modules:
        cli.load(_HEAVY)
        yield
        return
    # Ray's start has the main thread, since signals must be held back meanwhile.
    loading = threading.Thread(target=_import, name="paceline-imports", daemon=True)
    loading.start()
    with connected(address, insecure=insecure, num_workers=num_workers):
        loading.join()
        cli.load(_HEAVY)
        yield


def _import() -> None:
    with uncollected(), suppress(ImportError):  # to be raised by the next import, in the main thread
        importlib.import_module(_HEAVY)
