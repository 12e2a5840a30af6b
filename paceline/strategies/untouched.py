"""Whether anyone has changed parameters between two moments, at a cost that no step feels."""

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from paceline.strategies.digests import digest
from paceline.strategies.looks import Window, version_of

_WINDOW_BYTES = 2048


@final
class Untouched:
    """torch counts changes in place, but for those through `.data`. For changes through it, some bytes are looked at
    now and then on a CPU, so that a change of all parameters shows; digests of all are compared where that is asked
    for.

    Args:
        memories: that the parameters lie in; 1-D.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], memories: Sequence[Tensor]) -> None:
        self._parameters = parameters
        on_cpu = [memory for memory in memories if memory.is_cpu]
        self._windows = [Window(memory, _WINDOW_BYTES) for memory in on_cpu]
        self._begins = [memory.data_ptr() for memory in on_cpu]
        self._seen: list[bytes] = []  # through the windows
        self._versions: list[int] = []
        self._digests: list[str] | None = None
        self.accept(looks_closely=True)

    def accept(self, *, looks_closely: bool = False) -> None:
        """Parameters are as they should be.

        Args:
            looks_closely: any change is to show at the next look, through `.data` too.
        """
        self._versions = list(map(version_of, self._parameters))
        self.accept_values(looks_closely=looks_closely)

    def accept_values(self, *, looks_closely: bool = False) -> None:
        """As `accept`, by who has changed values past torch: what torch has counted up to now still shows."""
        looks_closely = looks_closely or self._digests is not None
        self._digests = self._all_digests() if looks_closely else None
        self._seen = []
        for window in self._windows:
            window.move_on()
            self._seen.append(window.read())

    def look(self) -> int | None:
        """The index of a parameter that was changed since `accept`."""
        versions = list(map(version_of, self._parameters))
        if versions != self._versions:
            return _first_unlike(self._versions, versions)
        digests, seen, self._digests, self._seen = self._digests, self._seen, None, []
        found = None if digests is None else _first_unlike(digests, self._all_digests())
        for begins, window, before in zip(self._begins, self._windows, seen, strict=False):  # none, if looked at before
            if found is None:
                found = self._found_in(window, begins, before)
        return found

    def _found_in(self, window: Window, begins: int, before: bytes) -> int | None:
        """What lies between parameters is nobody's."""
        now = window.read()
        if now == before:
            return None
        starts_at = begins + window.start
        for index, parameter in enumerate(self._parameters):
            place = parameter.data_ptr() - starts_at
            own = slice(max(0, place), max(0, place + parameter.nbytes))
            if before[own] != now[own]:
                return index
        return None

    def _all_digests(self) -> list[str]:
        return [digest([parameter]) for parameter in self._parameters]


def _first_unlike(before: Sequence[object], now: Sequence[object]) -> int | None:
    if before == now:
        return None
    return next(index for index, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
