"""What a script asks of a worker in one step, as far as the plan needs to know."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

from paceline.errors import UsageError
from paceline.planner.row_work import RowWork


@final
@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One worker's step. Raises UsageError if a number is out of range, or shares are not one a tensor."""

    tensor_bytes: tuple[int, ...]
    """Size of each parameter, in the optimizer's order; its gradient is as large."""
    samples: int
    """In a worker's batch."""
    step_s: float | None = None
    """Forward and backward pass on a host of speed 1 that the worker has to itself; none: as the cluster says."""
    forward_flop: float = 0.0
    """Operations of a forward pass, for clusters that say only what their hosts do of them."""
    forward_calls: int = 0
    """Operations that a forward pass calls, however large, for clusters that say what a framework takes for one."""
    backward_shares: tuple[float, ...] = ()
    """The part of the backward pass that each parameter's gradient takes; none: in proportion to the tensors' sizes."""
    state_bytes: float = 0.0
    """The optimizer's state, such as momentum: servers read and write it with every update."""
    is_element_wise: bool = True
    """Whether servers may cut tensors into pieces of 1 MiB; else each server's range goes as a whole."""
    tensor_shapes: tuple[tuple[int, ...], ...] = ()
    """Of each parameter, for codecs that look at matrices; none: as if all were square."""
    data_samples: int = 0
    """In the data set, for strategies that divide it among clients; 0: unknown."""
    overhead_s: float = 0.0
    """Seconds of a step besides both passes: batches, the script's own Python, a local optimizer's update."""

    rows: RowWork | None = None
    """Of tables (`paceline.nn.ShardedEmbedding`), if the model has some."""

    def __post_init__(self) -> None:
        if not self.tensor_bytes or min(self.tensor_bytes) < 1:
            raise UsageError("a plan needs the bytes of at least one parameter, each at least 1")
        if self.tensor_shapes and len(self.tensor_shapes) != len(self.tensor_bytes):
            raise UsageError(f"{len(self.tensor_shapes)} shapes for {len(self.tensor_bytes)} tensors")
        if self.samples < 1:
            raise UsageError(f"samples must be at least 1, not {self.samples}")
        if self.step_s is not None and not 0 < self.step_s < math.inf:
            raise UsageError(f"step_s must be above 0, not {self.step_s}")
        if self.backward_shares and len(self.backward_shares) != len(self.tensor_bytes):
            raise UsageError(f"{len(self.backward_shares)} backward shares for {len(self.tensor_bytes)} tensors")
        if self.backward_shares and not (min(self.backward_shares) >= 0 and 0 < sum(self.backward_shares) < math.inf):
            raise UsageError("backward shares must be at least 0, and not all 0")

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(self.tensor_bytes)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The part of the backward pass that each parameter's gradient takes; the parts add up to 1."""
        given = self.backward_shares or self.tensor_bytes
        total = math.fsum(given)
        return tuple(share / total for share in given)
