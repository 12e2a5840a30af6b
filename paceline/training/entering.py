"""What a worker under servers gives to one who joins, and what that one makes of it. Model and optimizer's state come
from the servers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch

from paceline.checkpoint import Checkpoint
from paceline.elastic import Member
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.nn.sharded_embedding import ShardedEmbedding
from paceline.training.checkpoints import Checkpoints
from paceline.training.pauses import Pauses
from paceline.training.sharding import Place
from paceline.training.taking import take
from paceline.training.worker_run import WorkerRun


@final
class Entering:
    """As `States`, where servers outlive workers."""

    def __init__(
        self, run: WorkerRun, pauses: Pauses, checkpoints: Checkpoints, *, on_taken: Callable[[Checkpoint], None]
    ) -> None:
        """`on_taken`: told what the script goes on from, when it comes to the place in its data."""
        self._run, self._pauses, self._checkpoints, self._on_taken = run, pauses, checkpoints, on_taken
        self.state_of_data: Callable[[], dict[str, Any]] = dict
        """What all workers have alike of the data, if the launcher does not have it."""
        self.take_up_data: Callable[[dict[str, Any]], None] = lambda state: None
        """Takes what another worker's `state_of_data` has given."""

    def given(self, member: Member, place: Place) -> dict[str, Any]:
        """What this worker's script has moved on, and what all workers have agreed on, before the batch that comes from
        this place."""
        return {
            "checkpoint": self._checkpoints.of_script(place).plain(),
            "member": [member.membership.epoch, list(member.membership.ranks), member.met],
            "pauses": self._pauses.state(),
            "model": self._model(),
            "row_rates": {table.spec.name: table.changed_lr for table in self._tables},
            "epoch": place.epoch,
            "data": self.state_of_data(),
        }

    def take(self) -> Member | None:
        """This worker's script asks for a pass over its data. Returns what it is when it takes part; None where the
        others are in a later epoch, and passes are empty until there.

        Raises:
            UsageError: this script prepares another model, or other data.
            BudgetReached: the run has ended.
        """
        return take(self._run, self._entered)

    def _entered(self, path: Path, epoch: int) -> Member | int:
        """Raises StaleEpoch where the others have met without this worker since."""
        content: dict[str, Any] = torch.load(path, weights_only=True)
        if content["epoch"] > epoch:
            return int(content["epoch"])
        checkpoint = Checkpoint.of_plain(content["checkpoint"])
        self._require_same_model(content["model"])
        for table in self._tables:
            table.changed_lr = content["row_rates"][table.spec.name]
        self._checkpoints.take_up_script(checkpoint, Place(epoch, 0))
        self._pauses.take_up(content["pauses"])
        in_epoch, ranks, met = content["member"]
        rank, keeper = self._run.context.rank, self._run.context.lane_keeper
        assert keeper is not None
        membership = keeper.enter(Member(rank, Membership(in_epoch, tuple(ranks)), has_stopped=True, met=met))
        self.take_up_data(content["data"])
        self._on_taken(checkpoint)
        return Member(rank, membership, met=met)

    @property
    def _tables(self) -> Sequence[ShardedEmbedding]:
        return self._run.prepared.replica.tables

    def _model(self) -> list[str]:
        parameters = [f"{spec.name} {list(spec.shape)} {spec.dtype}" for spec in self._run.prepared.replica.specs]
        return [*parameters, *(f"table {table.spec.name} {table.spec.plain()}" for table in self._tables)]

    def _require_same_model(self, theirs: list[str]) -> None:
        """Servers hold no names, and would take another model's gradients for theirs."""
        own = self._model()
        strange = sorted({*own} ^ {*theirs})
        if strange:
            raise UsageError(
                f"rank {self._run.context.rank} would join with another model: only one of the two has {strange[0]}"
            )
