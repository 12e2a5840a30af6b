"""How many steps clients that are elsewhere say that their changes are worth, as far as the server believes them."""

import statistics
from typing import final

_LEAST = 0.5
"""A turn is worth one step at least, but for rounding."""


@final
class Scales:
    """How much the changes of one round's clients are worth.

    Args:
        are_counted: strategies whose clients' changes count by the step.
    """

    def __init__(self, *, are_counted: bool) -> None:
        self.are_counted = are_counted
        self._said: list[tuple[float, float]] = []

    def require(self, scale: float) -> None:
        """Raises ValueError where a client says that its change is worth other steps than it can be."""
        if not self.are_counted and scale != 1.0:
            raise ValueError(f"it says that its change is worth {scale:g} steps, and steps do not count")
        if scale < _LEAST:
            raise ValueError(f"it says that its change is worth {scale:g} steps, less than one")

    def add(self, scale: float, *, weight: float) -> None:
        """A client says that its change is worth so many steps. `weight`: how much the client counts."""
        self._said.append((weight, scale))

    def joint(self, outweigh: float) -> float:
        """How many steps the joint of all is worth, where nobody's count as more than so many times the median's."""
        largest = outweigh * statistics.median(scale for _, scale in self._said)
        return sum(weight * min(scale, largest) for weight, scale in self._said) / sum(w for w, _ in self._said)

    def clear(self) -> None:
        """A new round begins."""
        self._said.clear()
