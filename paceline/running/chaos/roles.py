"""Whom a campaign strikes: the roles that a run has, and whose deaths it survives."""

from dataclasses import dataclass
from typing import final

from paceline.engines.striking import SERVERS, Places
from paceline.engines.striking.kinds import Who
from paceline.running.chaos.program import PLACES, exchanges_with
from paceline.strategies.traits import Traits


@final
@dataclass(frozen=True)
class Role:
    """Members that are struck.

    Args:
        who: worker or server.
        most: of them that may die in a run.
        is_elastic: one that is silent is ended, so that it may be stopped for good, and others may join.
    """

    who: Who
    places: Places
    most: int
    is_elastic: bool = True


def roles_of(traits: Traits, *, is_elastic: bool, workers: int, at_least: int) -> tuple[Role, ...]:
    """Args: as `Campaign` has them; `is_elastic`: its runs are."""
    roles: list[Role] = []
    if is_elastic and traits.survives:
        roles.append(Role("worker", PLACES[exchanges_with(traits)], workers - at_least))
    if traits.num_replicas:
        roles.append(Role("server", SERVERS, traits.num_replicas, is_elastic=is_elastic))
    return tuple(roles)
