"""A simulated worker in whose world others come, leave and die: it says so, hears who goes on, and meets them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar, final

from paceline.comm.base import Collective, Timing
from paceline.elastic import Done, Lane, LaneBatch, Member, StaleEpoch
from paceline.engines.virtual.network.collective import VirtualCollective
from paceline.engines.virtual.network.meeting import Meeting
from paceline.engines.virtual.process import Process
from paceline.engines.virtual.survival.roll import Answer, Roll
from paceline.errors import BudgetReached
from paceline.membership import Membership
from paceline.messages import Raw
from paceline.strategies.regrouping import Formed

T = TypeVar("T")


class Connect(Protocol):
    def __call__(self, meeting: Meeting, *, place: int, timing: Timing) -> Collective:
        """The end of a worker that has this place among those who meet there."""


@final
class VirtualReforming:
    """Implements `Regrouping` over the timeline, and `LaneKeeper` where workers take their own steps.

    Args:
        host_of: of each rank.
        send: has so many bytes travel from one rank's host to another's.
        joins: this worker takes no part yet.
    """

    def __init__(
        self,
        roll: Roll,
        process: Process,
        collective: Collective,
        *,
        rank: int,
        host_of: Callable[[int], int],
        connect: Connect,
        send: Callable[[int, int, float, Callable[[], object]], None],
        joins: bool = False,
    ) -> None:
        self._roll, self._process, self._collective, self._rank = roll, process, collective, rank
        self._host_of, self._connect, self._send = host_of, connect, send
        self.joins = joins
        self._states = ExitStack()

    @property
    def asked_to_give(self) -> tuple[int, ...]:
        return self._roll.asked_to_give(self._rank)

    @property
    def is_asked_to_leave(self) -> bool:
        return self._roll.is_asked_to_leave(self._rank)

    def give(self, write: Callable[[Path], None], *, member: Member, to: tuple[int, ...]) -> None:
        path = Path(self._states.enter_context(TemporaryDirectory(prefix="paceline-state-"))) / "state"
        write(path)
        num_bytes = float(path.stat().st_size)
        for rank in to:
            self._process.post(self._roll.give, member.rank, rank)
            arrive = partial(self._roll.offer, member.rank, rank, member.membership.epoch, path)
            self._process.post(self._send, self._host_of(member.rank), self._host_of(rank), num_bytes, arrive)

    def take(self, *, rank: int, epoch: int) -> int | Path:
        answer = Answer()
        self._process.post(self._roll.seek, rank, epoch, answer)
        self._process.wait(answer.done, lambda: "a state of the others")
        if answer.is_over:
            raise BudgetReached("the run has ended")
        return answer.epoch if answer.state is None else answer.state

    def leave(self, rank: int) -> None:
        self._process.post(self._roll.leave, rank)
        self._process.settle()

    def begin(self, rank: int, *, epoch: int) -> Lane | None:
        return self._asked(partial(self._roll.book.begin, rank, epoch=epoch))

    def next_left_over(self, rank: int, *, epoch: int, none: LaneBatch | None = None) -> LaneBatch | None:
        return self._asked(partial(self._roll.book.next_left_over, rank, epoch=epoch, none=none))

    def give_back(self, rank: int, rest: LaneBatch) -> None:
        self._process.post(self._roll.book.give_back, rank, rest)

    def gone(self, rank: int, done: Done) -> None:
        self._process.post(self._roll.gone, rank, done)

    def enter(self, member: Member) -> Membership:
        ranks = self._asked(partial(self._roll.enter, member.report()))
        if ranks is None:
            raise StaleEpoch(f"the others have met without rank {member.rank}")
        self.joins = False
        return Membership(member.membership.epoch, ranks)

    def lanes(self) -> Mapping[str, Any]:
        return self._asked(lambda: self._roll.book.plain)

    def resume(self, lanes: Mapping[str, Any]) -> None:
        self._asked(partial(self._roll.book.resume, lanes))

    def _asked(self, ask: Callable[[], T]) -> T:
        """What is said when the timeline has come to this worker's time."""
        self._process.settle()
        said = ask()
        self._process.post(self._roll.hand_over_all)  # what others wait for may be so now
        return said

    def __call__(self, member: Member, last_result: Callable[[], Sequence[Raw]]) -> Formed:
        process, timing = self._process, self._collective.timing
        began_s = process.catch_up()
        since_s = began_s
        if isinstance(self._collective, VirtualCollective):
            since_s = self._collective.lost_since_s or began_s
        member, answer = member.stopped(), Answer()
        process.post(self._roll.hear, member.report(), since_s, answer)
        process.wait(answer.done, lambda: "the others to stop, and to go on with them")
        timing.waiting_s += process.now_s - began_s
        self._states.close()
        if answer.form is None or answer.meeting is None:
            raise StaleEpoch(f"the others have gone on without rank {member.rank}")
        self.joins = False
        member, _ = member.formed(answer.form)
        ranks = member.membership.ranks
        self._collective = self._connect(answer.meeting, place=ranks.index(member.rank), timing=timing)
        here = self._host_of(member.rank)
        beside = [rank for rank in ranks if self._host_of(rank) == here]
        return Formed(member, self._collective, beside.index(member.rank), len(beside))
