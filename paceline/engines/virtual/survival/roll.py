"""Who takes part in a simulated run whose workers come and go: the launcher's half of the protocol, on the timeline."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from paceline.elastic import Coordinator, Done, Elastic, Form, LaneBook, Report, StaleEpoch
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network.meeting import Meeting
from paceline.engines.virtual.process import Signal
from paceline.engines.virtual.survival.ledger import Ledger
from paceline.engines.virtual.survival.outliving import Outliving
from paceline.membership import Membership


@dataclass(eq=False)
class Answer:
    """What a worker waits for."""

    form: Form | None = None
    """Who goes on; none: whoever has taken a state is to ask for another."""
    meeting: Meeting | None = None
    state: Path | None = None
    epoch: int = 0
    """The epoch of the data that the others are in, where the joiner has to go on to it."""
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
        book: of workers' data, where they take their own steps.
        outliving: has servers and that book go on without whoever is gone, or with who comes, where servers outlive
            workers.
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
        book: LaneBook | None = None,
        outliving: Outliving | None = None,
    ) -> None:
        self._book, self._outliving = book, outliving
        self._timeline, self._ledger, self._reform_s = timeline, ledger, reform_s
        self._meet, self._epoch_of, self._event = meet, epoch_of, event
        self._coordinator = Coordinator.first(membership, at_least=elastic.at_least)
        self.meeting = meet(membership)
        """Where the members of the present epoch meet."""
        self._stopped: dict[int, _Stopped] = {}
        self._seeking: dict[int, Answer] = {}
        self._states: dict[int, tuple[int, Path]] = {}  # for joiners, of the present epoch: the giver and the state
        self._gave: set[tuple[int, int]] = set()  # in the present epoch: giver and joiner
        self._entered: set[int] = set()  # take part, and have yet to meet the others
        self._leaving: set[int] = set()
        self._changed_s: float | None = None

    @property
    def living(self) -> tuple[int, ...]:
        return self._coordinator.living

    @property
    def staying(self) -> tuple[int, ...]:
        """The workers that have not been asked to leave."""
        return tuple(rank for rank in self.living if rank not in self._leaving)

    def committed_s(self, rank: int) -> float:
        """When what this rank had computed last became part of the model, or was about to."""
        if self._outliving is not None:
            return self._outliving.last_push_s(rank)
        return max(self.meeting.met_s, self.meeting.sent_s.get(self._place(rank), 0.0))

    def is_asked_to_leave(self, rank: int) -> bool:
        return rank in self._leaving

    def asked_to_give(self, rank: int) -> tuple[int, ...]:
        """Who waits for this rank's state."""
        coordinator = self._coordinator
        waiting = [other for other in coordinator.joining if other in self._seeking]
        if self._outliving is not None and rank in coordinator.living:  # each has a lane, to be given back
            return tuple(other for other in waiting if (rank, other) not in self._gave)
        return tuple(other for other in waiting if other not in self._states) if rank == coordinator.giver else ()

    @property
    def book(self) -> LaneBook:
        """Of the workers' data, where they take their own steps."""
        assert self._book is not None
        return self._book

    def gone(self, rank: int, done: Done) -> None:
        """Those who are there have agreed on how far this worker's work counts. A second word does nothing."""
        if self.book.is_present(rank):
            self.book.gone(rank, done)
            self._event("let_go", f"worker-{rank}", **done._asdict())

    def _place(self, rank: int) -> int:
        """Where the members of this epoch meet."""
        ranks = self._coordinator.membership.ranks
        return ranks.index(rank) if rank in ranks else -1

    # --- what hosts do ------------------------------------------------------------------------------------------

    def retire(self, rank: int) -> None:
        """It is to leave between two steps."""
        self._leaving.add(rank)

    def lose(self, rank: int, *, died_s: float) -> None:
        """It is known to have died, some time ago."""
        self._begin_change(died_s)
        self._coordinator, form = self._coordinator.died(rank)
        self._drop(rank)
        self.meeting.lose(f"worker {rank} is gone", rank=self._place(rank))
        self._go_on_without(rank)
        self._send(form)

    def _go_on_without(self, rank: int) -> None:
        """What it has given cannot be had of it any more."""
        self._states = {to: state for to, state in self._states.items() if state[0] != rank}
        if self._outliving is not None:
            self._outliving.let_go(rank)
            self._gave = {(giver, to) for giver, to in self._gave if to in self._states}
            self.hand_over_all()

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
        self.meeting.lose(f"worker {rank} leaves", rank=self._place(rank))
        self._drop(rank)
        self._coordinator, form = self._coordinator.died(rank)
        self._go_on_without(rank)
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
        others = max(map(self._data_epoch, self.living), default=0)
        if not self.living or epoch < others:
            answer.epoch, answer.is_over = others, not self.living
            answer.done.fire(self._timeline)
            return
        if rank not in self._coordinator.joining:
            self._event("ready", f"worker-{rank}")
        self._coordinator = self._coordinator.joined(rank)
        self._seeking[rank] = answer
        self._hand_over(rank)

    def give(self, giver: int, to: int) -> None:
        """The state is on its way."""
        self._gave.add((giver, to))

    def offer(self, giver: int, to: int, epoch: int, state: Path) -> None:
        """The state has come to the host of whoever joins. Where workers take their own steps, that one goes on as the
        one in the furthest epoch of the data."""
        if epoch == self._coordinator.membership.epoch and giver in self.living:
            before = self._states.get(to)
            if before is None or self._data_epoch(giver) >= self._data_epoch(before[0]):
                self._states[to] = giver, state
            self._hand_over(to)

    def enter(self, report: Report) -> tuple[int, ...] | None:
        """Under servers a joiner that has a state takes part at once. Returns who does, whom it meets in the next
        pause; none: they have met without it since it was given that state."""
        assert self._outliving is not None
        try:
            self._coordinator = self._coordinator.entered(report)
        except StaleEpoch:
            return None
        self._outliving.let_in(report.rank)
        self._states.pop(report.rank, None)
        self._entered.add(report.rank)
        self._ledger.has_joined(report.rank, self._timeline.now_s)
        return tuple(sorted(self.living))

    def hand_over_all(self) -> None:
        """Hand a state to all who join and can have one by now."""
        for rank in list(self._seeking):
            self._hand_over(rank)

    def _data_epoch(self, rank: int) -> int:
        """Which it is in; where it has a lane, which it has begun: there it may be through with the last."""
        own = self._epoch_of(rank)
        return own if self._book is None else self._book.epochs.get(rank, own)

    def _hand_over(self, rank: int) -> None:
        """Under servers when all have given back what is left of their lanes, so that a joiner finds what to do."""
        yet_to_give = [other for other in self.living if (other, rank) not in self._gave]
        if self._outliving is not None and not self.book.have_given_back(yet_to_give):
            return
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
        self._entered.discard(rank)

    def _send(self, form: Form | None) -> None:
        """Have those of the next epoch go on, and joiners whose giver is gone ask again."""
        assert self._coordinator.ahead is None, "what one has completed, all complete"
        if form is None:
            return
        self.meeting = self._meet(form.membership)
        if self._book is not None and self._outliving is None:
            for rank in form.membership.ranks:
                self._book.come(rank)
        stopped, self._stopped, self._states = self._stopped, {}, {}
        self._gave.clear()
        self._timeline.at(self._timeline.now_s + self._reform_s, self._go_on, form, self.meeting, stopped)

    def _go_on(self, form: Form, meeting: Meeting, stopped: dict[int, _Stopped]) -> None:
        now_s = self._timeline.now_s
        began_s, self._changed_s = self._changed_s or now_s, None
        ranks, step = form.membership.ranks, form.step
        coming = [rank for rank in ranks if rank in stopped and self._ledger.is_coming(rank)]
        for rank in coming:
            self._ledger.has_joined(rank, now_s)
        joined = [*coming, *(rank for rank in ranks if rank in self._entered)]
        self._entered.difference_update(ranks)
        waits = [now_s - max(each.since_s, began_s) for rank, each in stopped.items() if rank not in joined]
        self._ledger.lost_regrouping_s += sum(waits)
        details = {"epoch": form.membership.epoch, "ranks": list(ranks), "step": step, "joined": joined}
        self._event("reformed", took_s=now_s - began_s, virtual_time_s=now_s, **details)
        for rank, each in stopped.items():
            if rank in ranks:
                each.answer.form, each.answer.meeting = form, meeting
            each.answer.done.fire(self._timeline)
