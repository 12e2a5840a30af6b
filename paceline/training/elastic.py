"""A worker's run while others come, leave and die: it regroups with those who are there, and goes on from the step that
all have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, final

from paceline.checkpoint import WorkerState
from paceline.elastic import Deal, Elastic, Member
from paceline.errors import UsageError
from paceline.messages import Raw
from paceline.strategies.base import Context, Synchronizer
from paceline.strategies.regrouping import Regrouping
from paceline.training import script_schedulers
from paceline.training.all_done import AllDone
from paceline.training.given import Given
from paceline.training.joining import Giving, States
from paceline.training.sharding import Place
from paceline.training.sharding.dealt import Dealt
from paceline.training.sharding.orders import Orders
from paceline.training.surviving import meet_others, regrouped, repeated, require_one_of_each
from paceline.training.worker_run import WorkerRun

T = TypeVar("T")


@final
class Survivor:
    """What a synchronizer that repeats steps asks (`Recovery`), and what a session asks.

    Raises:
        UsageError: the script has what cannot be repeated or dealt anew.
    """

    def __init__(self, run: WorkerRun, elastic: Elastic) -> None:
        self._run, self._elastic = run, elastic
        self._member = Member(run.context.rank, run.context.membership)
        self._data: Dealt | None = None
        self._giving: Giving | None = None
        self._lacks_deals = False  # its state is from before what others have been dealt
        self.lacks_script = False
        """This worker has joined with schedulers of where a round began that the others have ended."""
        self.all_done = AllDone(run)
        """That all workers together have trained on."""
        self.states: States | None = None
        self.last_result: Callable[[], Sequence[Raw]] = tuple
        self.end_pass: Callable[[], bool] = lambda: True
        """Called where an exchange is of several batches, and all of a pass are dealt out: it ends with them. Returns
        whether the run goes on."""
        self.on_joined: Callable[[], None] = lambda: None
        """Called when somebody has come, before the next step: on all workers after the same one."""

    def attach(self, given: Given) -> None:
        """Look at what the script has prepared, and whose batches are committed."""
        require_one_of_each(given)
        if self._elastic.global_batch == "keep":
            script_schedulers.hold_back(given.extra, self._run)

    def deals(self, orders: Orders) -> Dealt:
        """What deals out the samples of the loader."""
        context = self._run.context
        if not orders.has_end:
            raise UsageError("--elastic needs to know an epoch's samples; give the DataLoader a sampler with an end")
        self._data = Dealt(
            orders,
            rank=context.rank,
            membership=context.membership,
            global_batch=self._elastic.global_batch,
            end_pass=None if self._is_stepwise else lambda: self.end_pass(),
        )
        return self._data

    def require_between_rounds(self, place: str) -> None:
        """Raises UsageError in a round of several steps: if somebody dies, its exchange alone is repeated."""
        if not self._is_stepwise and self._dealt.under_way:
            raise UsageError(
                f"{place}: with --elastic workers cannot meet in the middle of a round; have them meet after the last "
                "batch of a pass, or leave --elastic out"
            )

    def require_prepared_schedulers(self, given: dict[str, Any], optimizer: Any) -> None:
        """Raises UsageError for a scheduler that would step where the optimizer does not."""
        if self._elastic.global_batch == "keep":
            script_schedulers.require_prepared(given, optimizer)

    @property
    def counts(self) -> tuple[int, int]:
        return self.all_done.said

    @property
    def under_way(self) -> tuple[Deal, ...]:
        """What all have been dealt since the last exchange."""
        return self._dealt.under_way

    def leaves(self) -> bool:
        """Whether this worker has been asked to leave, and has left: it is between two exchanges, of which the last
        has had all that it owed."""
        reform = self._reform
        if not reform.is_asked_to_leave or self._run.has_ended or self._dealt.under_way:
            return False
        if self._run.prepared.synchronizer.owes:
            return False
        reform.leave(self._run.context.rank)
        return True

    def enters(self) -> bool:
        """Whether this worker, which joins, takes part from here on: its script asks for a pass over its data, and may
        be in an epoch that the others have left behind."""
        assert self.states is not None
        self._dealt.lay_out_next(self._run.prepared.feed.loader)
        return self.states.take()

    def give(self, place: Place) -> None:
        """After an exchange, before the batch that comes from this place: give this worker's state to those who wait
        for one. With the rest of an update they could not do anything."""
        to, under_way = self._reform.asked_to_give, self._dealt.under_way
        may_enter = self._run.prepared.synchronizer.takes_in
        if to and self._giving is None and len(under_way) == 1 and under_way[0].begins and may_enter:
            assert self.states is not None
            member, content = self._member, self.states.given(place, self._member)
            beside = not self._run.context.pacing.is_simulated
            self._giving = Giving(self._reform, content, member=member, to=to, dealt=under_way[0], beside=beside)
            if not self._is_stepwise:  # the model changes before the next exchange
                self._giving.end()

    def state(self) -> dict[str, Any]:
        """What all workers have alike of the samples, as plain data."""
        return {"counts": list(self.all_done.now), "data": self._dealt.state()}

    def for_later(self, worker: WorkerState) -> WorkerState:
        worker = self.all_done.for_later(worker)
        return replace(worker, stream=self._dealt.state_for_later())

    def in_pause(self, worker: WorkerState) -> WorkerState:
        """Whoever is the first now may not have been so at the end of its script."""
        return self.all_done.for_later(worker)

    def go_on_from(self, workers: Sequence[WorkerState], *, iteration: int) -> list[WorkerState]:
        return self.all_done.go_on_from(workers, iteration=iteration)

    def take_up(self, state: Mapping[str, Any], member: Member) -> None:
        """This worker has taken another one's state, and with it its place in the data."""
        self.all_done.take_up(state["counts"])
        self._member, self._lacks_deals = member, not self._is_stepwise
        self.lacks_script = self._lacks_deals
        self._dealt.take_up(state["data"], member.membership)

    def meet_others(self, synchronizer: Synchronizer, *, facts: Mapping[str, float | str]) -> None:
        """As `meet_others`."""
        meet_others(synchronizer, self.regroup, facts=facts)

    def share_script(self) -> None:
        """Whoever lacks it takes up what the first worker's script has moved on. Collective call in a pause."""
        script_schedulers.share(self._run, is_lacking=self.lacks_script)
        self.lacks_script = False

    # --- as Recovery ------------------------------------------------------------------------------------------

    @property
    def has_given(self) -> bool:
        return self._giving is not None

    @property
    def begins_update(self) -> bool:
        return all(dealt.begins for dealt in self._dealt.under_way)

    @property
    def weight(self) -> float:
        return self._dealt.weight()

    @property
    def weights(self) -> tuple[float, ...]:
        return self._dealt.weights()

    @property
    def share(self) -> float:
        return sum(dealt.share for dealt in self._dealt.under_way)

    @property
    def num_dealt(self) -> int:
        return self._dealt.num_dealt

    def weight_of(self, first: int, stop: int) -> float:
        return self._dealt.weight(first, stop)

    def weights_of(self, first: int, stop: int) -> tuple[float, ...]:
        return self._dealt.weights(first, stop)

    def commit(self, *, asks_from: int | None = None) -> bool:
        handouts, under_way = self._run.prepared.feed.handouts, self._dealt.under_way
        if not self._is_stepwise:
            handouts.look_back()  # otherwise the backward pass of one batch is under way
        if handouts.num_out > self._is_stepwise or (self._is_stepwise and not under_way):
            raise UsageError(
                f"rank {self._run.context.rank}: with --elastic a gradient is to be of the batch that the loader gave "
                "last, which nothing tells here; train on each batch once, before the next one "
                "(DataLoader(num_workers=...) reads ahead by itself), or leave --elastic out"
            )
        self.all_done.add(under_way)
        self._member = self._member.with_result().with_step_applied()
        is_complete, self._lacks_deals = self._dealt.commit(asks_from=asks_from), False
        if is_complete:
            self.all_done.complete()
        return is_complete

    def regroup(self) -> Context:
        run, before = self._run, self._member.membership.ranks
        run.awaits_others = False
        self._member = regrouped(run, self._with_what_is_given(), self.last_result)
        self._dealt.resize(self._member.membership)
        if set(self._member.membership.ranks) - set(before):
            self.on_joined()
        if not self._is_stepwise:  # the oldest has been dealt all that is under way
            data = run.context.collective.broadcast_object(self._dealt.state())
            if self._lacks_deals:
                self._dealt.take_up(data, self._member.membership)
        return run.context

    # --- where all workers meet -------------------------------------------------------------------------------

    def repeated(self, meet: Callable[[], T], part: Callable[[], None], synchronizer: Synchronizer) -> T:
        return repeated(
            meet,
            part,
            rejoin=lambda: synchronizer.rejoin(self.regroup()),
            num_met=lambda: self._member.met,
            end=self._end_meeting,
        )

    def _end_meeting(self) -> None:
        self._member = self._member.with_meeting_ended()

    def _with_what_is_given(self) -> Member:
        """A state counts if the round that follows it is the one under way: a script may have left a batch out."""
        giving, self._giving = self._giving, None
        if giving is None:
            return self._member
        giving.end()
        counts = any(dealt is giving.dealt for dealt in self._dealt.under_way[:1])
        return self._member.with_state_given(giving.to if counts else ())

    @property
    def _is_stepwise(self) -> bool:
        """Whether each batch has an exchange of its own; otherwise one is of a round of local steps."""
        return self._run.traits.lock_step

    @property
    def _reform(self) -> Regrouping:
        reform = self._run.context.reform
        assert reform is not None
        return reform

    @property
    def _dealt(self) -> Dealt:
        assert self._data is not None
        return self._data
