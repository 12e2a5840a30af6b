"""Has workers join or leave, and servers join: one of the run asks its launcher for another number of them, as
`paceline scale` does."""

import contextlib
import json
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, final

from paceline.engines import requests
from paceline.errors import UsageError

_FILE = "sizes.json"


@final
class Sizes(NamedTuple):
    """How many workers a run is to have when it is asked to grow, and to shrink, and how many servers when it is asked
    for more."""

    grown: int
    shrunk: int
    servers: int

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(self))


def grow(folder: Path) -> AbstractContextManager[None]:
    return _scale(folder, workers=_read(folder).grown)


def shrink(folder: Path) -> AbstractContextManager[None]:
    return _scale(folder, workers=_read(folder).shrunk)


def more_servers(folder: Path) -> AbstractContextManager[None]:
    """In a thread, since a server that waits for the launcher may be waited for by it."""
    threading.Thread(target=_scale, args=(folder,), kwargs={"servers": _read(folder).servers}, daemon=True).start()
    return nullcontext()


def _read(folder: Path) -> Sizes:
    return Sizes(*json.loads((folder / _FILE).read_text()))


def _scale(folder: Path, **wanted: int) -> AbstractContextManager[None]:
    with contextlib.suppress(UsageError):  # the run is about to end
        requests.ask(folder / "out", {"do": "scale", **wanted})
    return nullcontext()
