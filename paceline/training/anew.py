"""A worker's run whose steps need no other worker, but whose model is its own: those who are left when others die, or
join, meet anew between two of their steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from paceline.checkpoint import Checkpoint, WorkerState
from paceline.elastic import Done, Member
from paceline.errors import PeerLost
from paceline.membership import Membership
from paceline.strategies.base import Context
from paceline.training.checkpoints import Checkpoints
from paceline.training.outlived import Outlived
from paceline.training.pauses import Pauses
from paceline.training.sharding import Place
from paceline.training.taking import take
from paceline.training.worker_run import WorkerRun


@final
class OwnStates:
    """What a worker gives of its own model to one who joins, and what that one makes of it. Its place in the data is
    its own affair."""

    def __init__(
        self, run: WorkerRun, pauses: Pauses, checkpoints: Checkpoints, *, on_taken: Callable[[Checkpoint], None]
    ) -> None:
        """`on_taken`: told what the script goes on from, when it comes to the place in its data."""
        self._run, self._pauses, self._checkpoints, self._on_taken = run, pauses, checkpoints, on_taken

    def given(self, member: Member, place: Place, had: Mapping[int, Done]) -> dict[str, Any]:
        """This worker's state, before the batch that comes from this place; tensors are its own.

        Args:
            had: by worker, how far its work is in that.
        """
        return {
            "checkpoint": self._checkpoints.of_this_worker(place).plain(),
            "member": [member.rank, member.membership.epoch, list(member.membership.ranks), member.met],
            "pauses": self._pauses.state(),
            "had": {rank: list(done) for rank, done in had.items()},
            "epoch": place.epoch,
        }

    def take_up(self, path: Path, epoch: int) -> tuple[Member, dict[int, Done], Checkpoint] | int:
        """This worker's script has come to this epoch of its data. Returns who gave the state, what that had, and
        itself; or the epoch that it is of, if that is a later one."""
        content: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
        if content["epoch"] > epoch:
            return int(content["epoch"])
        checkpoint = Checkpoint.of_plain(content["checkpoint"])
        mine = replace(checkpoint.workers[0], epoch=epoch, num_batches_done=0, samples=0, steps=0)
        self._checkpoints.take_up(checkpoint, mine)
        self._pauses.take_up(content["pauses"])
        rank, in_epoch, ranks, met = content["member"]
        giver = Member(rank, Membership(in_epoch, tuple(ranks)), met=met)
        return giver, {int(rank): Done(*done) for rank, done in content["had"].items()}, checkpoint

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """This worker takes part, with that state."""
        self._on_taken(checkpoint)


@final
class Anew(Outlived):
    """As `Surviving` and `Reunion`."""

    def __init__(self, run: WorkerRun) -> None:
        super().__init__(run)
        self.states: OwnStates | None = None
        self.had: Callable[[], Mapping[int, Done]] = dict
        self.taken: Mapping[int, Done] = {}
        self._gives: tuple[int, ...] = ()  # ranks that have this worker's state, and that it is to meet
        self._from: Member | None = None  # after it had taken another one's state

    def enters(self) -> bool:
        return take(self._run, self._entered) is not None

    def give(self, place: Place) -> None:
        """This worker takes no step before it has met whoever takes that."""
        reform = self._reform
        to = reform.asked_to_give
        if not to or self._gives or self._run.has_ended:
            return
        assert self.states is not None
        content = self.states.given(self._member, place, self.had())
        self._gives, self._is_whole = to, False
        reform.give(lambda path: torch.save(content, path), member=self._member, to=to)

    def go_on_from(self, workers: Sequence[WorkerState], *, iteration: int) -> list[WorkerState]:
        found = super().go_on_from(workers, iteration=iteration)
        self._run.context.collective.barrier()  # nobody asks for data before it is known what is left
        return found

    # --- as Reunion -------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        return not self._is_whole

    def meet(self) -> Context:
        return self._regroup()

    def leave_to_others(self, gone: Mapping[int, Done]) -> None:
        for rank, done in gone.items():
            self._keeper.gone(rank, done)

    def _regroup(self) -> Context:
        """Those who are there before one joins leave to all, the joiner included, what they have not begun of their
        lanes."""
        before = self._member.membership
        self._member, self._gives = self._member.with_state_given(self._gives), ()
        context = super()._regroup()
        if set(context.membership.ranks) - set(before.ranks) and self._data is not None:
            self._data.give_back()
        return context

    def _entered(self, path: Path, epoch: int) -> Member | int:
        """Raises StaleEpoch where the others have gone on without this worker."""
        assert self.states is not None
        found = self.states.take_up(path, epoch)
        if isinstance(found, int):
            return found
        giver, self.taken, checkpoint = found
        rank, synchronizer = self._run.context.rank, self._run.prepared.synchronizer
        self._from = self._member = giver.state_taken(rank, before=self._from)
        while True:
            try:
                synchronizer.rejoin(self._regroup())
                break
            except PeerLost:
                pass
        self.states.go_on_from(checkpoint)
        return self._member
