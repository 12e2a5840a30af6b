"""An all-reduce by one of the algorithms, as work that is under way."""

from typing import Protocol, final

from torch import Tensor

from paceline.comm.algorithms.partial_sum import SumOrMean
from paceline.comm.base import Collective, Work


class AllReduceAlgorithm(Protocol):
    """Sums or averages a contiguous tensor over all ranks, in place; bitwise the same result on every rank.

    Uses nothing of the collective but `rank`, `size`, `send` and `recv`, and raises what those raise.
    """

    def __call__(self, collective: Collective, tensor: Tensor, *, op: SumOrMean = "mean") -> None: ...


@final
class AlgorithmWork(Work):
    """Runs when it is waited for, so that messages of two all-reduces do not mix."""

    def __init__(
        self, collective: Collective, algorithm: AllReduceAlgorithm, tensor: Tensor, *, op: SumOrMean = "mean"
    ) -> None:
        self._collective = collective
        self._algorithm = algorithm
        self._tensor: Tensor | None = tensor
        self._op = op

    def poll(self) -> bool:
        return self._tensor is None

    def wait(self) -> None:
        if self._tensor is not None:
            self._algorithm(self._collective, self._tensor, op=self._op)
            self._tensor = None
