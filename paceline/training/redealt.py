"""A worker's run that plays clients while others come, leave and die: whoever is left plays the turns of those who are
gone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, final

import torch

from paceline.checkpoint import WorkerState
from paceline.elastic import Member
from paceline.errors import UsageError
from paceline.messages import Raw
from paceline.roster import Roster
from paceline.strategies.base import Context, Synchronizer
from paceline.training.all_done import AllDone
from paceline.training.given import Given
from paceline.training.joining import States
from paceline.training.sharding import Place
from paceline.training.sharding.orders import Orders
from paceline.training.surviving import meet_others, regrouped, repeated, require_one_of_each
from paceline.training.worker_run import WorkerRun

T = TypeVar("T")


@final
class Redealt:
    """As `Surviving`, and as `Redealing` for the synchronizer. The step that all have in common is a round."""

    lacks_script = False

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._member = Member(run.context.rank, run.context.membership)
        self._gives: tuple[int, ...] = ()  # ranks that have this worker's state
        self._before = (0, 0)  # samples and batches of this worker when the round began
        self.all_done = AllDone(run)
        self.states: States | None = None
        self.last_result: Callable[[], Sequence[Raw]] = tuple

    def attach(self, given: Given) -> None:
        require_one_of_each(given)

    def deals(self, orders: Orders) -> NoReturn:
        raise AssertionError("clients' data are theirs")

    def require_between_rounds(self, place: str) -> None:
        """Raises UsageError: when a worker is gone, others play its turns, in further passes over their loaders."""
        raise UsageError(
            f"{place}: with --elastic workers cannot meet in a loop over clients, where each may be dealt the turns of "
            "another that is gone; let @worker.evaluation judge the model, or leave --elastic out"
        )

    def require_prepared_schedulers(self, given: dict[str, Any], optimizer: Any) -> None:
        pass

    @property
    def counts(self) -> tuple[int, int]:
        return self.all_done.said

    def leaves(self) -> bool:
        """Whether this worker has been asked to leave, and has left: it has played nothing of the round."""
        run, reform = self._run, self._run.context.reform
        assert reform is not None
        if not reform.is_asked_to_leave or run.has_ended or run.prepared.synchronizer.owes:
            return False
        reform.leave(run.context.rank)
        return True

    def enters(self) -> bool:
        assert self.states is not None
        return self.states.take()

    def give(self, place: Place) -> None:
        """A turn begins, and this worker has the server's model in the place of its own."""
        run, reform = self._run, self._run.context.reform
        assert reform is not None
        assert self.states is not None
        to = reform.asked_to_give
        if not to or self._gives or run.has_ended:
            return
        content = self.states.given(place, self._member)
        self._gives = to
        reform.give(lambda path: torch.save(content, path), member=self._member, to=to)

    def state(self) -> dict[str, Any]:
        """What all workers have alike of the round, as plain data, and this one's number of turns before it."""
        run = self._run
        return {
            "counts": list(self.all_done.now),
            "word": self._roster.word(run.prepared.synchronizer.iteration),
            "num_turns": run.epoch,
        }

    def take_up(self, state: Mapping[str, Any], member: Member) -> None:
        """This worker has taken another one's state. It counts its turns from that one's place on, or from its own
        script's, which may have gone further to be where the furthest was."""
        run, feed = self._run, self._run.prepared.feed
        num_turns = max(state["num_turns"], feed.loader.place.epoch)
        feed.loader.resume_at(Place(num_turns, 0), {})
        self.all_done.take_up(state["counts"])
        self._member, self._before = member, (run.samples, run.steps)
        self._roster.take_up(state["word"], run.prepared.synchronizer.iteration, num_turns=num_turns)

    def meet_others(self, synchronizer: Synchronizer, *, facts: Mapping[str, float | str]) -> None:
        """As `meet_others`."""
        meet_others(synchronizer, self.regroup, facts=facts)

    def for_later(self, worker: WorkerState) -> WorkerState:
        return self.all_done.for_later(worker)

    def in_pause(self, worker: WorkerState) -> WorkerState:
        """Whoever is the first now may not have been so at the end of its script."""
        return self.for_later(worker)

    def go_on_from(self, workers: Sequence[WorkerState], *, iteration: int) -> list[WorkerState]:
        """With any number of workers: each has what all the clients of all workers have kept."""
        own = {name: tensor for worker in reversed(workers) for name, tensor in worker.own.items()}
        fates = {name: fate for worker in reversed(workers) for name, fate in worker.fates.items()}
        context = self._run.context
        found = self.all_done.go_on_from(workers, iteration=iteration)
        mine = found[context.rank]
        self._before = (mine.samples, mine.steps)
        self._roster.begin_at(iteration, num_turns=mine.epoch)
        return [replace(each, own=own, fates=fates) for each in found]

    def share_script(self) -> None:
        pass

    def repeated(self, meet: Callable[[], T], part: Callable[[], None], synchronizer: Synchronizer) -> T:
        return repeated(
            meet,
            part,
            rejoin=lambda: synchronizer.rejoin(self.regroup()),
            num_met=lambda: self._member.met,
            end=self._end_meeting,
        )

    # --- as Redealing -----------------------------------------------------------------------------------------

    @property
    def has_given(self) -> bool:
        return bool(self._gives)

    @property
    def trained(self) -> tuple[int, int]:
        samples, batches = self._before
        return self._run.samples - samples, self._run.steps - batches

    def commit(self, trained: tuple[int, int]) -> None:
        self.all_done.count(*trained)
        self.all_done.complete()
        self._before = (self._run.samples, self._run.steps)
        self._member = self._member.with_result().with_step_applied()

    def regroup(self) -> Context:
        run, member = self._run, self._member
        run.awaits_others = False
        if self._gives:
            member, self._gives = member.with_state_given(self._gives), ()
        self._member = regrouped(run, member, self.last_result)
        return run.context

    def _end_meeting(self) -> None:
        self._member = self._member.with_meeting_ended()

    @property
    def _roster(self) -> Roster:
        roster = self._run.context.roster
        assert roster is not None
        return roster
