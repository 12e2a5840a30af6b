"""Whether anyone has changed parameters between two moments, at a cost that no step feels."""

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from paceline.arrays import as_array
from paceline.strategies.digests import digest

_WINDOW_BYTES = 4096


@final
class Untouched:
    """torch counts changes in place, but for those through `.data`. For these, on a CPU, some of the bytes are kept, at
    every step others, so that a change of all parameters shows at once; and digests of all where that is asked for.

    Args:
        flat: the memory that the parameters lie in, as uint8.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
        self._parameters = parameters
        self._flat = as_array(flat) if flat.is_cpu else None
        self._begins = flat.data_ptr()
        self._start = 0
        self._window = b""
        self._versions: list[int] = []
        self._digests: list[str] | None = None
        self.accept(looks_closely=True)

    def accept(self, *, looks_closely: bool = False) -> None:
        """Parameters are as they should be.

        Args:
            looks_closely: any change is to show at the next look, through `.data` too.
        """
        looks_closely = looks_closely or self._digests is not None
        self._versions = self._count_changes()
        self._digests = self._all_digests() if looks_closely else None
        if self._flat is not None:
            self._start = self._start + _WINDOW_BYTES if self._start + _WINDOW_BYTES < len(self._flat) else 0
            self._window = self._bytes()

    def look(self) -> int | None:
        """The index of a parameter that was changed since `accept`."""
        found = _first_unlike(self._versions, self._count_changes())
        if found is None and self._digests is not None:
            found = _first_unlike(self._digests, self._all_digests())
        if found is None and self._flat is not None and self._window != self._bytes():
            found = self._found_in_window()
        self._digests = None
        return found

    def _found_in_window(self) -> int | None:
        """What lies between parameters is nobody's."""
        for index, parameter in enumerate(self._parameters):
            place = parameter.data_ptr() - self._begins - self._start
            own = slice(max(0, place), max(0, place + parameter.nbytes))
            if self._window[own] != self._bytes()[own]:
                return index
        return None

    def _bytes(self) -> bytes:
        assert self._flat is not None
        found: bytes = self._flat[self._start : self._start + _WINDOW_BYTES].tobytes()
        return found

    def _all_digests(self) -> list[str]:
        return [digest([parameter]) for parameter in self._parameters]

    def _count_changes(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]


def _first_unlike(before: Sequence[object], now: Sequence[object]) -> int | None:
    if before == now:
        return None
    return next(index for index, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
