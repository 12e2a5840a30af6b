"""A worker's run under servers that outlive workers, where all have a part in each round, as updates of whole global
batches need, and aggregators that compare what is pushed. All go through the data together, with one cursor, which
follows what the servers say of each round."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, final

from paceline.checkpoint import WorkerState
from paceline.elastic import Done, GlobalBatch
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.server.whole_updates import Share, Took
from paceline.strategies.base import Synchronizer
from paceline.training import script_schedulers
from paceline.training.all_done import AllDone
from paceline.training.given import Given
from paceline.training.outlived import Outlived
from paceline.training.sharding import Place
from paceline.training.sharding.dealt import Dealt
from paceline.training.sharding.orders import Orders
from paceline.training.worker_run import WorkerRun

T = TypeVar("T")


@final
class WholeBatches:
    """As `Surviving`, and what a synchronizer asks (`Rounds`). Workers come, leave and meet as `Outlived` has it.

    Whoever has taken part in a round is dealt a part of the next one. So all know the same of each round from what the
    servers say of the one before, and nobody has to be told who is there. Who joins has nothing of the round that it
    comes to.

    Args:
        global_batch: whether an update takes as many rounds as its samples do, or each round is one.
    """

    def __init__(self, run: WorkerRun, outlived: Outlived, global_batch: GlobalBatch) -> None:
        self._run, self._outlived, self._global_batch = run, outlived, global_batch
        self._data: Dealt | None = None
        self._all_done = AllDone(run)
        self._num_handed = 0  # batches of the round that is under way
        self._is_behind = False  # it has a state that others may have left behind
        self.lacks_script = False

    @property
    def counts(self) -> tuple[int, int]:
        return self._all_done.said

    def attach(self, given: Given) -> None:
        self._outlived.attach(given)
        if self._keeps:
            script_schedulers.hold_back(given.extra, self._run)

    def deals(self, orders: Orders) -> Dealt:
        context = self._run.context
        if not orders.has_end:
            raise UsageError("--elastic needs to know an epoch's samples; give the DataLoader a sampler with an end")
        self._data = Dealt(orders, rank=context.rank, membership=context.membership, global_batch=self._global_batch)
        return self._data

    def require_between_rounds(self, place: str) -> None:
        self._outlived.require_between_rounds(place)

    def require_prepared_schedulers(self, given: dict[str, Any], optimizer: Any) -> None:
        if self._keeps:
            script_schedulers.require_prepared(given, optimizer)

    def leaves(self) -> bool:
        return self._outlived.leaves()

    def enters(self) -> bool:
        self._dealt.lay_out_next(self._run.prepared.feed.loader)
        return self._outlived.enters()

    def give(self, place: Place) -> None:
        self._num_handed = 1 if place.num_batches_done == 0 else self._num_handed + 1
        self._require_one()
        self._outlived.give(place)

    def for_later(self, worker: WorkerState) -> WorkerState:
        worker = self._all_done.for_later(worker)
        # Who has joined counts batches of its own from there on, and is where the others are.
        return replace(worker, num_batches_done=self._dealt.num_done_of_pass, stream=self._dealt.state_for_later())

    def in_pause(self, worker: WorkerState) -> WorkerState:
        return worker

    def go_on_from(self, workers: Sequence[WorkerState], *, iteration: int) -> list[WorkerState]:
        return self._all_done.go_on_from(workers, iteration=iteration)

    def share_script(self) -> None:
        script_schedulers.share(self._run, is_lacking=self.lacks_script)
        self.lacks_script = False

    def repeated(self, meet: Callable[[], T], part: Callable[[], None], synchronizer: Synchronizer) -> T:
        return self._outlived.repeated(meet, part, synchronizer)

    # --- for who joins ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What all workers have alike of the data, as plain data."""
        dealt = self._dealt
        return {"counts": list(self._all_done.now), "ranks": list(dealt.ranks), "data": dealt.state()}

    def take_up(self, state: dict[str, Any]) -> None:
        """This worker has another one's, from which it goes on when it is admitted."""
        self._all_done.take_up(state["counts"])
        self._dealt.take_up(state["data"], Membership(1, tuple(state["ranks"])))
        self._is_behind = True

    def admitted(self, *, clock: int, took: Sequence[Took]) -> None:
        """As `Rounds`."""
        if not self._is_behind:
            return
        self._is_behind = False
        clocks = range(self._dealt.num_done, clock)
        self.lacks_script = len(clocks) > 0
        workers = [next(each.workers for each in reversed(took) if each.clock <= number) for number in clocks]
        self._dealt.enter(deque(partial(self.ended, each) for each in workers))

    # --- as Rounds --------------------------------------------------------------------------------------------

    def done(self) -> Done:
        """As `Context.done`."""
        run, feed = self._run, self._run.prepared.feed
        return Done(feed.place.epoch, samples=run.samples + feed.handouts.num_samples, steps=run.steps + 1)

    def share(self) -> Share:
        """As `Rounds`. Raises UsageError where the gradient is not of the batch that was handed out last."""
        self._require_one()
        feed = self._run.prepared.feed
        if feed.handouts.num_out or not self._dealt.under_way:
            self._refuse()
        (deal,) = self._dealt.under_way
        own = len(deal.parts[self._dealt.place])
        return Share(own, deal.num_samples if self._keeps else 0, feed.loader.place.epoch, deal.after.num_groups)

    def ended(self, workers: Sequence[int]) -> bool:
        """As `Rounds`."""
        dealt = self._dealt
        dealt.go_on_with(workers)
        self._all_done.add(dealt.under_way)
        self._num_handed = 0
        is_complete = dealt.commit()
        if is_complete:
            self._all_done.complete()
        return is_complete

    def _require_one(self) -> None:
        if self._num_handed > 1:
            self._refuse()

    def _refuse(self) -> None:
        may_grow = self._run.traits.joins_by_mean
        given, instead = ("--global-batch keep", "--global-batch grow") if may_grow else ("aggregate", "aggregate=mean")
        raise UsageError(
            f"rank {self._run.context.rank}: with --elastic and {given} each step is to be of the batch "
            "that the loader gave last, and each batch of one step; step after each batch "
            f"(DataLoader(num_workers=...) reads ahead by itself), or use {instead}"
        )

    @property
    def _keeps(self) -> bool:
        return self._global_batch == "keep"

    @property
    def _dealt(self) -> Dealt:
        assert self._data is not None
        return self._data
