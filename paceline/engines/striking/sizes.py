"""Has workers join or leave: one of the run asks its launcher for another number of them, as `paceline scale` does."""

import contextlib
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, final

from paceline.engines import requests
from paceline.errors import UsageError

_FILE = "sizes.json"


@final
class Sizes(NamedTuple):
    """How many workers a run is to have when it is asked to grow, and to shrink."""

    grown: int
    shrunk: int

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(self))


def grow(folder: Path) -> AbstractContextManager[None]:
    return _scale(folder, _read(folder).grown)


def shrink(folder: Path) -> AbstractContextManager[None]:
    return _scale(folder, _read(folder).shrunk)


def _read(folder: Path) -> Sizes:
    return Sizes(*json.loads((folder / _FILE).read_text()))


def _scale(folder: Path, workers: int) -> AbstractContextManager[None]:
    with contextlib.suppress(UsageError):  # the run is about to end
        requests.ask(folder / "out", {"do": "scale", "workers": workers})
    return nullcontext()
