"""The state of a run that trains: one worker gives it to those who join, and they take it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from paceline.checkpoint import Checkpoint
from paceline.elastic import Deal, Member
from paceline.membership import Membership
from paceline.strategies.regrouping import Regrouping
from paceline.training.checkpoints import Checkpoints
from paceline.training.sharding import Place
from paceline.training.taking import take
from paceline.training.worker_run import WorkerRun

if TYPE_CHECKING:
    from paceline.training.elastic import Survivor
    from paceline.training.pauses import Pauses
    from paceline.training.redealt import Redealt


@final
class Giving:
    """A state that a thread writes while the script computes its next gradients: parameters and the optimizer's state
    change only when these are applied.

    Args:
        content: plain data and tensors, of which none may change until `end`.
        dealt: the round that they are to be applied after.
        beside: in a thread; otherwise it is written at once.
    """

    def __init__(
        self,
        reform: Regrouping,
        content: dict[str, Any],
        *,
        member: Member,
        to: tuple[int, ...],
        dealt: Deal,
        beside: bool = True,
    ) -> None:
        self.to, self.dealt = to, dealt
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not beside:
            self._write(reform, content, member)
            return
        self._thread = threading.Thread(
            target=self._write, args=(reform, content, member), name="paceline-giving", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Return when all is written. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _write(self, reform: Regrouping, content: dict[str, Any], member: Member) -> None:
        try:
            reform.give(lambda path: torch.save(content, path), member=member, to=self.to)
        except BaseException as error:
            self._error = error


@final
class States:
    """What a worker between two steps gives to one who joins, and what that one makes of it."""

    def __init__(
        self,
        run: WorkerRun,
        survivor: "Survivor | Redealt",
        pauses: "Pauses",
        checkpoints: Checkpoints,
        *,
        on_taken: Callable[[Checkpoint], None],
    ) -> None:
        """`on_taken`: told what the script goes on from, when it comes to the place in its data."""
        self._run, self._survivor = run, survivor
        self._pauses, self._checkpoints, self._on_taken = pauses, checkpoints, on_taken
        self._taken: Member | None = None

    def given(self, place: Place, member: Member) -> dict[str, Any]:
        """This worker's state, before the batch that comes from this place; tensors are its own, but for buffers."""
        prepared = self._run.prepared
        return {
            "checkpoint": self._checkpoints.of_this_worker(place).plain(),
            "member": [member.rank, member.membership.epoch, list(member.membership.ranks), member.applied],
            "survivor": self._survivor.state(),
            "pauses": self._pauses.state(),
            "progress": list(prepared.handouts.progress()),
            "facts": dict(prepared.synchronizer.facts),
        }

    def take(self) -> bool:
        """This worker's script asks for a pass over its data. Returns whether it takes part; not where the others are
        in a later epoch, and passes are empty until there.

        Raises:
            UsageError: this script prepares another model, or other data.
            BudgetReached: the run has ended.
        """
        return take(self._run, self._entered) is not None

    def _entered(self, path: Path, epoch: int) -> Member:
        """Raises StaleEpoch where the others have gone on without this worker."""
        content = self._read(path)
        checkpoint = Checkpoint.of_plain(content["checkpoint"])
        self._checkpoints.take_up(checkpoint, checkpoint.workers[0])
        self._pauses.take_up(content["pauses"])
        self._run.prepared.feed.handouts.take_up(content["progress"])
        member = self._taken_of(content["member"])
        self._survivor.take_up(content["survivor"], member)
        self._survivor.meet_others(self._run.prepared.synchronizer, facts=content["facts"])
        self._on_taken(checkpoint)
        return member

    def _read(self, path: Path) -> dict[str, Any]:
        """Tensors stay where they are until they are copied into the model's: nothing is unpickled freely."""
        content: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
        return content

    def _taken_of(self, said: list[Any]) -> Member:
        rank, epoch, ranks, applied = said
        giver = Member(rank, Membership(epoch, tuple(ranks)), applied)
        self._taken = giver.state_taken(self._run.context.rank, before=self._taken)
        return self._taken
