"""A worker's word with whoever knows who takes part, while workers come, leave and die."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline.comm.base import Collective
from paceline.elastic import Done, Lane, LaneBatch, Member
from paceline.membership import Membership
from paceline.messages import Raw
from paceline.server.whole_updates import Share, Took


class Formed(NamedTuple):
    """Who goes on after a death, or with one who joins."""

    member: Member
    collective: Collective
    local_rank: int
    local_size: int


class ResultHandedOn(Exception):
    """Another member has applied the step that was under way: this one is to apply it, too, and then to regroup.

    Args:
        frames: the whole result, as whoever has applied it kept it (`Recovery.last_result`).
    """

    def __init__(self, frames: Sequence[Raw]) -> None:
        super().__init__()
        self.frames = frames


class Regrouping(Protocol):
    """What an engine gives each worker of a run whose workers come and go."""

    joins: bool
    """This worker has come while the others train, and takes no part yet."""

    def __call__(self, member: Member, last_result: Callable[[], Sequence[Raw]]) -> Formed:
        """Called by a member that has lost sight of another one, or given its state to one who joins, and by the joiner
        when it has taken it: returns with those who go on. Collective call of these. Raises ResultHandedOn where others
        have gone on a step further.

        Args:
            last_result: of the last step that the member has applied.
        """

    @property
    def asked_to_give(self) -> tuple[int, ...]:
        """Ranks that wait for this worker's state."""

    def give(self, write: Callable[[Path], None], *, member: Member, to: tuple[int, ...]) -> None:
        """Have them find in a file what `write` writes there, of a member between two steps. From any thread."""

    def take(self, *, rank: int, epoch: int) -> int | Path:
        """This worker joins, and its script has come to this epoch of the data. Returns the epoch that the others are
        in, if that is a later one; or a file with the state of one of them."""

    @property
    def is_asked_to_leave(self) -> bool:
        """This worker is to end between two steps."""

    def leave(self, rank: int) -> None:
        """It takes no further step; the others go on without it."""


class Rounds(Protocol):
    """What a synchronizer asks under servers if all workers have a part in each round: where an update is of a whole
    global batch, and takes as many as it needs, or where servers compare the gradients of one."""

    def share(self) -> Share:
        """What this worker's gradient has of its update. Raises UsageError where nothing tells."""

    def ended(self, workers: Sequence[int]) -> bool:
        """A round is over, which these took part in, each with a part. Returns whether its update is complete."""

    def admitted(self, *, clock: int, took: Sequence[Took]) -> None:
        """This worker goes on at this clock, without having pushed. `took`: who took part in rounds so far."""


class LaneKeeper(Protocol):
    """What an engine gives each worker of a run whose workers take their own steps: word with whoever knows who has
    which of the data."""

    def begin(self, rank: int, *, epoch: int) -> Lane | None:
        """This worker comes to this epoch. Returns its lane, if it was there when the epoch was dealt."""

    def next_left_over(self, rank: int, *, epoch: int, none: LaneBatch | None = None) -> LaneBatch | None:
        """This worker is through with its own data of the epoch. Returns a batch that is left to it, if there is one.

        Args:
            none: what was returned before, where the lane has no such batch.
        """

    def give_back(self, rank: int, rest: LaneBatch) -> None:
        """This worker leaves its lane, from this batch on, to whoever asks for it."""

    def gone(self, rank: int, done: Done) -> None:
        """This worker does nothing more, and the rest is left to all, as those who are there have agreed. What is said
        of it a second time does nothing."""

    def enter(self, member: Member) -> Membership:
        """Under servers: this worker joins, with a state of the epoch that this member of it is of, and takes part.
        Returns who does, whom it meets in the next pause. Raises StaleEpoch where the others have met without it."""

    def lanes(self) -> Mapping[str, Any]:
        """`Lanes.plain`, as it is now."""

    def resume(self, lanes: Mapping[str, Any]) -> None:
        """The run goes on from there, which nobody has begun to do."""
