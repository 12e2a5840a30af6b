"""A worker's run under servers that outlive workers: its steps need no other worker, and only in pauses do all meet."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from paceline.checkpoint import WorkerState
from paceline.elastic import Done, Lanes, Member
from paceline.errors import UsageError
from paceline.strategies.base import Context, Synchronizer
from paceline.strategies.regrouping import LaneKeeper, Regrouping
from paceline.strategies.traits import Served
from paceline.training.entering import Entering
from paceline.training.given import Given
from paceline.training.sharding import Place
from paceline.training.sharding.lane import LaneData, Reached
from paceline.training.sharding.orders import Orders
from paceline.training.surviving import regrouped, repeated, require_one_of_each
from paceline.training.worker_run import WorkerRun

T = TypeVar("T")


class Outlived:
    """As `Surviving`: says with each push what it has done, so that others can do the rest."""

    lacks_script = False

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._member = Member(run.context.rank, run.context.membership)
        self._data: LaneData | None = None
        self._is_whole = True  # all who take part are connected, as far as this worker knows
        self.entering: Entering | None = None

    @property
    def counts(self) -> tuple[int, int]:
        run, samples, steps = self._run, 0, 0
        if run.context.is_first and self._member.membership.epoch > 1:
            lanes = Lanes.of_plain(self._keeper.lanes())
            samples, steps = lanes.samples, lanes.steps
        return run.samples + samples, run.steps + steps

    def attach(self, given: Given) -> None:
        require_one_of_each(given)

    def deals(self, orders: Orders) -> LaneData:
        context = self._run.context
        if not orders.has_end:
            raise UsageError("--elastic needs to know an epoch's samples; give the DataLoader a sampler with an end")
        self._data = LaneData(orders, rank=context.rank, keeper=self._keeper)
        return self._data

    def done(self) -> Done:
        """As `Context.done`."""
        run, feed = self._run, self._run.prepared.feed
        reached = self._reached(feed.place)
        return Done(feed.place.epoch, *reached, run.samples + feed.handouts.num_samples, run.steps + 1)

    def require_between_rounds(self, place: str) -> None:
        served = [each for each in self._run.traits.traffic or () if isinstance(each, Served)]
        if any(each.staleness != math.inf for each in served):
            raise UsageError(
                f"{place}: with --elastic under ps-bsp, ps-ssp and async-diloco workers cannot wait for each other at "
                "a place of their scripts: once one has gone or come, they reach it after other numbers of steps, for "
                "which others wait; let @worker.evaluation judge the model, or use ps-asp"
            )

    def require_prepared_schedulers(self, given: dict[str, Any], optimizer: Any) -> None:
        pass

    def leaves(self) -> bool:
        reform = self._reform
        if not reform.is_asked_to_leave or self._run.has_ended or self._run.prepared.synchronizer.owes:
            return False
        reform.leave(self._run.context.rank)  # and the launcher has the servers go on without it
        return True

    def enters(self) -> bool:
        assert self.entering is not None
        member = self.entering.take()
        if member is None:
            return False
        run = self._run
        self._member, self._is_whole = member, False
        run.context = replace(run.context, membership=member.membership)
        run.prepared.synchronizer.rejoin(run.context)
        run.prepared.synchronizer.enter()
        return True

    def give(self, place: Place) -> None:
        """To who joins: what is left of this worker's lane, and what servers do not have. That says when all meet next,
        so that this worker meets nobody from here on before the launcher has said who is there."""
        reform = self._reform
        to = reform.asked_to_give
        if not to or self._run.has_ended:
            return
        assert self.entering is not None
        if self._data is not None:
            self._data.give_back()
        content = self.entering.given(self._member, place)
        self._is_whole = False
        reform.give(lambda path: torch.save(content, path), member=self._member, to=to)

    def for_later(self, worker: WorkerState) -> WorkerState:
        place = Place(worker.epoch, worker.num_batches_done, worker.stream)
        return replace(worker, stream={"rank": self._run.context.rank, "reached": list(self._reached(place))})

    def in_pause(self, worker: WorkerState) -> WorkerState:
        if not self._run.context.is_first:
            return worker
        lanes = dict(self._keeper.lanes())
        samples, steps = worker.samples + lanes["samples"], worker.steps + lanes["steps"]
        return replace(worker, stream={**worker.stream, "lanes": lanes}, samples=samples, steps=steps)

    def go_on_from(self, workers: Sequence[WorkerState], *, iteration: int) -> list[WorkerState]:
        """With any number of workers, from what is left of the epochs that were begun."""
        size, everyone = self._run.context.size, _done_by(workers)
        lanes = Lanes.resumed(_lanes_of(workers), everyone, num_workers=size)
        if self._run.context.is_first:
            self._keeper.resume(lanes.plain)
        begun = max(lanes.dealt, default=0)
        epoch = begun if lanes.before(begun + 1) or not lanes.dealt else begun + 1
        first, own = workers[0], [*workers[:size], *(workers[0],) * (size - len(workers))]
        counts = [(each.samples, each.steps) for each in workers[:size]] + [(0, 0)] * (size - len(workers))
        gone = workers[size:]
        counts[0] = first.samples + sum(each.samples for each in gone), first.steps + sum(each.steps for each in gone)
        return [
            replace(each, epoch=epoch, num_batches_done=0, stream=None, samples=samples, steps=steps)
            for each, (samples, steps) in zip(own, counts, strict=True)
        ]

    def share_script(self) -> None:
        pass

    def repeated(self, meet: Callable[[], T], part: Callable[[], None], synchronizer: Synchronizer) -> T:
        return repeated(
            meet,
            part,
            is_whole=self._is_whole,
            rejoin=lambda: synchronizer.rejoin(self._regroup()),
            num_met=lambda: self._member.met,
            end=self._end_meeting,
        )

    @property
    def _reform(self) -> Regrouping:
        reform = self._run.context.reform
        assert reform is not None
        return reform

    @property
    def _keeper(self) -> LaneKeeper:
        keeper = self._run.context.lane_keeper
        assert keeper is not None
        return keeper

    def _reached(self, place: Place) -> Reached:
        assert self._data is not None
        return self._data.reached(place)

    def _end_meeting(self) -> None:
        self._member = self._member.with_meeting_ended()

    def _regroup(self) -> Context:
        """Wait for all who are left, however many steps these have to go until here."""
        run = self._run
        run.awaits_others = True
        self._member = regrouped(run, self._member, tuple)
        run.awaits_others, self._is_whole = False, True
        return run.context


def _done_by(workers: Sequence[WorkerState]) -> dict[int, Done]:
    """How far each of a checkpoint's workers was, by its rank; of one that was no elastic run under servers, all have
    had their own lanes."""
    found = {}
    for rank, each in enumerate(workers):
        if isinstance(each.stream, Mapping) and "reached" in each.stream:
            found[each.stream["rank"]] = Done(each.epoch, *each.stream["reached"])
        else:
            found[rank] = Done(each.epoch, each.num_batches_done)
    return found


def _lanes_of(workers: Sequence[WorkerState]) -> Mapping[str, Any]:
    first = workers[0]
    if isinstance(first.stream, Mapping) and "lanes" in first.stream:
        lanes: Mapping[str, Any] = first.stream["lanes"]
        return lanes
    epochs, ranks = [each.epoch for each in workers], tuple(range(len(workers)))
    return Lanes(ranks, dict.fromkeys(range(min(epochs), max(epochs) + 1), ranks)).plain
