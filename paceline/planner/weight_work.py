"""What a step has gradients of in weights of `nn.Embedding(sparse=True)`, as a few steps of a script show it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from paceline.engines.virtual.server import state_bytes
from paceline.planner.row_work import growth, joining_bytes, of_batches, together
from paceline.server.tables.entries import KEY_BYTES
from paceline.server.tables.table import Table
from paceline.strategies.by_rows import moved_by_rows
from paceline.strategies.replica import Replica
from paceline.strategies.served_weights import ServedWeight, served_by_rows
from paceline.strategies.sparse_gradients import rows_of

_WORD_BYTES = 8
"""Where workers give one another rows, each says whose they are, and of each weight in what form and how many."""


@final
@dataclass(frozen=True, kw_only=True)
class WeightWork:
    """One weight, of which rows may move. Means of a step of one worker."""

    index: int
    """Its place among the parameters."""
    num_rows: int
    row_bytes: int
    touched: tuple[float, ...]
    """Different rows that the gradients of 1, 2, ... workers' batches have."""
    is_dense: bool = False
    """Its gradients are: it is used outside of its layer, too. Servers get rows even so."""
    state_bytes: float = 0.0
    """The optimizer's state of the whole weight."""
    update_bytes: float | None = None
    """A server reads and writes so many for each row; none: servers do not take its rows."""

    def rows_of(self, num_batches: int) -> float:
        """Different ones of so many batches."""
        return min(float(self.num_rows), of_batches(self.touched, num_batches))

    def moved_bytes(self, num_batches: int) -> float:
        """Of these rows, with their keys."""
        return (KEY_BYTES + self.row_bytes) * self.rows_of(num_batches)

    def updated_bytes(self, num_batches: int) -> float:
        """A server reads and writes so many to update these rows."""
        if self.update_bytes is None:
            return 0.0
        return self.update_bytes * self.rows_of(num_batches) + joining_bytes(num_batches, self.moved_bytes(1))

    def of_part(self, part: float) -> "WeightWork":
        """Of a batch that is this part of the one that was looked at. Rows grow with batches as from one to two."""
        factor = growth(self.touched, part)
        return replace(self, touched=tuple(each * factor for each in self.touched))


def moved_bytes(weights: Sequence[WeightWork], num_batches: int) -> float:
    return sum(weight.moved_bytes(num_batches) for weight in weights)


def told_bytes(weights: Sequence[WeightWork]) -> float:
    """What a worker gives to all others of those with sparse gradients."""
    return _WORD_BYTES * (1 + 2 * len(weights)) + moved_bytes([each for each in weights if not each.is_dense], 1)


@final
class WatchedWeights:
    """Notes which rows of a replica's weights each step has gradients of."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._weights = sorted(moved_by_rows(replica))
        self._dense: set[int] = set()
        self._steps: list[dict[int, Tensor]] = []

    @property
    def are_some(self) -> bool:
        return bool(self._weights)

    def end_step(self) -> None:
        """Gradients are those of the step."""
        gradients = {index: self._replica.parameters[index].grad for index in self._weights}
        found = {index: each for index, each in gradients.items() if each is not None}
        self._dense.update(index for index, each in found.items() if not each.is_sparse)
        specs = self._replica.specs
        self._steps.append({index: rows_of(each, name=specs[index].name).keys for index, each in found.items()})

    def work(self) -> tuple[WeightWork, ...]:
        return tuple(map(self._of, self._weights))

    def _of(self, index: int) -> WeightWork:
        replica, parameter = self._replica, self._replica.parameters[index]
        is_served = index in served_by_rows(replica)
        return WeightWork(
            index=index,
            num_rows=len(parameter),
            row_bytes=parameter.nbytes // len(parameter),
            is_dense=index in self._dense,
            touched=together([{index: step[index]} if index in step else {} for step in self._steps], {index: 1.0}),
            state_bytes=state_bytes(replica.optimizer, [parameter]),
            update_bytes=Table(ServedWeight(replica, index).spec).update_bytes if is_served else None,
        )
