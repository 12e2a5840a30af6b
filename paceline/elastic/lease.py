"""How long a member may go on without word of the coordinator's."""

import math
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Lease:
    """A value: each answer of the coordinator's makes the next one (Gray and Cheriton, "Leases", SOSP 1989).

    It runs from when the member asked for it, so that the coordinator, which counts from when it heard that, knows when
    a member that is cut off has ended.

    >>> Lease.granted(3.0, asked_s=10.0).has_ended(now_s=13.5)
    True
    """

    until_s: float = math.inf
    """By the member's own clock; for ever where the coordinator gives no lease."""

    @classmethod
    def granted(cls, length_s: float | None, *, asked_s: float) -> "Lease":
        """`length_s`: None for ever. `asked_s`: when the member asked, by its own clock."""
        return cls() if length_s is None else cls(asked_s + length_s)

    def has_ended(self, *, now_s: float) -> bool:
        return now_s > self.until_s
