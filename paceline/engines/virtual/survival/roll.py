"""Who takes part in a simulated run whose workers come and go: the launcher's half of the protocol, on the timeline."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from paceline.elastic import Coordinator, Elastic, Form, Report, StaleEpoch
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network.meeting import Meeting
from paceline.engines.virtual.process import Signal
from paceline.engines.virtual.survival.ledger import Ledger
from paceline.membership import Membership


@dataclass(eq=False)
class Answer:
    """What a worker waits for."""

    form: Form | None = None
    """Who goes on; none: whoever has taken a state is to ask for another."""
    meeting: Meeting | None = None
    state: Path | None = None
    epoch: int = 0
    """Of the others' data, where the joiner has to go on to it."""
    is_over: bool = False
    """There is nobody to join any more."""
    done: Signal = field(default_factory=Signal)


@dataclass(frozen=True)
class _Stopped:
    report: Report
    since_s: float
    answer: Answer


@final
class Roll:
    """All methods are called on the timeline. Raises RunFailed where too few workers are left.

    Args:
        reform_s: from when all have stopped until they go on.
        meet: makes the place where the workers of an epoch meet.
        epoch_of: of its data, which a worker is in.
        event: writes down what happens.
    """

    def __init__(
        self,
        elastic: Elastic,
        timeline: EventQueue,
        ledger: Ledger,
        *,
        membership: Membership,
        reform_s: float,
        meet: Callable[[Membership], Meeting],
        epoch_of: Callable[[int], int],
        event: Callable[..., None],
    ) -> None:
        self._timeline, self._ledger, self._reform_s = timeline, ledger, reform_s
        self._meet, self._epoch_of, self._event = meet, epoch_of, event
        self._coordinator = Coordinator.first(membership, at_least=elastic.at_least)
        self.meeting = meet(membership)
        """Of the present epoch."""
        self._stopped: dict[int, _Stopped] = {}
        self._seeking: dict[int, Answer] = {}
        self._states: dict[int, tuple[int, Path]] = {}  # for joiners, of the present epoch: the giver and the state
        self._leaving: set[int] = set()
        self._changed_s: float | None = None

    @property
    def living(self) -> tuple[int, ...]:
        return self._coordinator.living

    @property
    def staying(self) -> tuple[int, ...]:
        """Those who have not been asked to leave."""
        return tuple(rank for rank in self.living if rank not in self._leaving)

    def is_asked_to_leave(self, rank: int) -> bool:
        return rank in self._leaving

    def asked_to_give(self, rank: int) -> tuple[int, ...]:
        """Who waits for this rank's state."""
        coordinator = self._coordinator
        wanted = tuple(other for other in coordinator.joining if other in self._seeking and other not in self._states)
        return wanted if rank == coordinator.giver else ()

    # --- what hosts do ------------------------------------------------------------------------------------------

    def retire(self, rank: int) -> None:
        """It is to leave between two steps."""
        self._leaving.add(rank)

    def lose(self, rank: int, *, died_s: float) -> None:
        """It is known to have died, some time ago."""
        self._begin_change(died_s)
        self._coordinator, form = self._coordinator.died(rank)
        self._states = {to: state for to, state in self._states.items() if state[0] != rank}
        self._drop(rank)
        self.meeting.lose(f"worker {rank} is gone")
        self._send(form)

    def end(self, rank: int) -> None:
        """It has come to its end, or does not join."""
        self._drop(rank)
        self._coordinator, form = self._coordinator.ended(rank)
        self._send(form)
        if not self.living:
            waiting = [*self._seeking.values(), *(stopped.answer for stopped in self._stopped.values())]
            self._seeking, self._stopped = {}, {}
            for answer in waiting:
                answer.is_over = True
                answer.done.fire(self._timeline)

    def leave(self, rank: int) -> None:
        """It takes no further step."""
        self._begin_change(self._timeline.now_s)
        self._event("left", f"worker-{rank}", left=len(self.living) - 1)
        self._ledger.ends(rank, self._timeline.now_s)
        self.meeting.lose(f"worker {rank} leaves")
        self._drop(rank)
        self._coordinator, form = self._coordinator.died(rank)
        self._send(form)

    # --- what workers say ---------------------------------------------------------------------------------------

    def hear(self, report: Report, since_s: float, answer: Answer) -> None:
        """A worker has stopped, and has waited in vain since then."""
        if report.rank in self.living:  # nobody waits yet when a joiner has the state
            self._begin_change(self._timeline.now_s)
        self._stopped[report.rank] = _Stopped(report, since_s, answer)
        try:
            self._coordinator, form = self._coordinator.hear(report)
        except StaleEpoch:
            del self._stopped[report.rank]
            answer.done.fire(self._timeline)
            return
        if self._coordinator.awaited:
            self.meeting.lose("a worker joins or is gone")
        self._send(form)

    def seek(self, rank: int, epoch: int, answer: Answer) -> None:
        """A joiner's script has come to this epoch of its data."""
        others = max((self._epoch_of(other) for other in self.living), default=0)
        if not self.living or epoch < others:
            answer.epoch, answer.is_over = others, not self.living
            answer.done.fire(self._timeline)
            return
        if rank not in self._coordinator.joining:
            self._event("ready", f"worker-{rank}")
        self._coordinator = self._coordinator.joined(rank)
        self._seeking[rank] = answer
        self._hand_over(rank)

    def offer(self, giver: int, to: int, epoch: int, state: Path) -> None:
        """The state has come to the host of whoever joins."""
        if epoch == self._coordinator.membership.epoch and giver in self.living:
            self._states[to] = giver, state
            self._hand_over(to)

    def _hand_over(self, rank: int) -> None:
        if rank in self._states and rank in self._seeking:
            answer = self._seeking.pop(rank)
            answer.state = self._states[rank][1]
            answer.done.fire(self._timeline)

    def _begin_change(self, since_s: float) -> None:
        self._changed_s = since_s if self._changed_s is None else self._changed_s

    def _drop(self, rank: int) -> None:
        self._stopped.pop(rank, None)
        self._seeking.pop(rank, None)
        self._leaving.discard(rank)

    def _send(self, form: Form | None) -> None:
        """Have those of the next epoch go on, and joiners whose giver is gone ask again."""
        assert self._coordinator.ahead is None, "what one has completed, all complete"
        if form is None:
            return
        self.meeting = self._meet(form.membership)
        stopped, self._stopped, self._states = self._stopped, {}, {}
        self._timeline.at(self._timeline.now_s + self._reform_s, self._go_on, form, self.meeting, stopped)

    def _go_on(self, form: Form, meeting: Meeting, stopped: dict[int, _Stopped]) -> None:
        now_s = self._timeline.now_s
        began_s, self._changed_s = self._changed_s or now_s, None
        ranks, step = form.membership.ranks, form.step
        joined = [rank for rank in ranks if rank in stopped and self._ledger.is_coming(rank)]
        for rank in joined:
            self._ledger.has_joined(rank, now_s)
        waits = [now_s - max(each.since_s, began_s) for rank, each in stopped.items() if rank not in joined]
        self._ledger.lost_regrouping_s += sum(waits)
        details = {"epoch": form.membership.epoch, "ranks": list(ranks), "step": step, "joined": joined}
        self._event("reformed", took_s=now_s - began_s, virtual_time_s=now_s, **details)
        for rank, each in stopped.items():
            if rank in ranks:
                each.answer.form, each.answer.meeting = form, meeting
            each.answer.done.fire(self._timeline)
