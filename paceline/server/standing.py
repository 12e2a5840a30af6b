"""Where a shard stands: what it knows besides its parameters and its optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.server.closing import Groups
from paceline.server.whole_updates import Took


class ShardStanding(NamedTuple):
    """What is still to be joined is no part of it: workers give that again to whoever takes over."""

    iteration: int
    clocks: Mapping[int, tuple[int, int]]
    """As `Shard.clocks` gives them."""
    counted: Mapping[int, tuple[int, int]]
    """Of each worker, clock and staleness of its last contribution that was closed."""
    groups: Mapping[int, tuple[int, Groups]]
    """By worker: hyperparameters that have come with its contribution, and this one's clock."""
    in_force: Groups
    active: Sequence[int]
    begins: Mapping[int, int]
    """As `AdmissionRule.begins`."""
    stop: bool
    took: Sequence[Took]
    """As `WholeUpdate.took`, where updates may take several rounds."""


def to_body(standing: ShardStanding) -> dict[str, Any]:
    """What says it in a message's body."""
    return {
        "iteration": standing.iteration,
        "clocks": _rows(standing.clocks),
        "counted": _rows(standing.counted),
        "groups": [[worker, clock, groups] for worker, (clock, groups) in standing.groups.items()],
        "in_force": standing.in_force,
        "active": list(standing.active),
        "begins": [[worker, clock] for worker, clock in standing.begins.items()],
        "stop": standing.stop,
        "took": [[clock, list(workers)] for clock, workers in standing.took],
    }


def from_body(body: Mapping[str, Any]) -> ShardStanding:
    """Raises LookupError, TypeError or ValueError if this is nothing that `to_body` gives."""
    return ShardStanding(
        body["iteration"],
        {worker: (clock, pulled_at) for worker, clock, pulled_at in body["clocks"]},
        {worker: (clock, staleness) for worker, clock, staleness in body["counted"]},
        {worker: (clock, of_groups(groups)) for worker, clock, groups in body["groups"]},
        of_groups(body["in_force"]),
        body["active"],
        dict(body["begins"]),
        body["stop"],
        [Took(clock, tuple(workers)) for clock, workers in body["took"]],
    )


def of_groups(groups: Sequence[Mapping[str, Any]]) -> Groups:
    """As they were before JSON, which has lists where optimizers have tuples (betas)."""
    return [
        {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()} for group in groups
    ]


def _rows(numbers: Mapping[int, tuple[int, int]]) -> list[list[int]]:
    return [[worker, *pair] for worker, pair in numbers.items()]
