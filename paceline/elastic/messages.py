"""What members and the coordinator say to one another."""

from dataclasses import dataclass
from typing import final

from paceline.errors import PacelineError
from paceline.membership import Membership


class StaleEpoch(PacelineError):
    """A message is of another epoch of membership, or of somebody who takes no part any more."""


@final
@dataclass(frozen=True)
class Report:
    """A member has lost sight of another, or has given its state to one who joins, and has stopped: it gives nothing
    more in this epoch, and applies nothing. A joiner says so when it has taken the state."""

    epoch: int
    rank: int
    applied: int
    """Steps that it has applied."""
    holds: bool
    """It has the whole result of the next step, which it has not applied."""
    gives: tuple[int, ...] = ()
    """Ranks that it has given its state to, as it is after these steps."""
    met: int = 0
    """Meetings between two steps that it has come out of."""


@final
@dataclass(frozen=True)
class Form:
    """Those of this membership go on together."""

    membership: Membership
    step: int
    """Steps that everybody is to have applied before the next one: whoever has one less holds its result."""
    met: int = 0
    """Meetings that are over: whoever is still in one of them has all of it, and goes on as the others have."""
