"""What a script asks of a worker in one step, as far as the plan needs to know."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from paceline.errors import UsageError
from paceline.planner.row_work import RowWork
from paceline.planner.weight_work import WeightWork
from paceline.strategies import build
from paceline.strategies.traits import Traits


@final
@dataclass(frozen=True)
class Demand:
    """The strategy that a script takes alone.

    Args:
        by: what in it demands it, such as `MirroredStrategy`.
        strategy: Paceline's name of it.
        servers: how many; none: any number.
        is_of_one_host: it refuses workers on several.
    """

    by: str
    strategy: str
    servers: int | None
    is_of_one_host: bool = False

    def allows(self, traits: Traits) -> bool:
        """Whether the script runs under strategies of these traits, with the right number of servers."""
        return traits.exchanges_nothing or traits.exchanges_as(build(self.strategy).traits)

    def allows_servers(self, traits: Traits) -> bool:
        return traits.exchanges_nothing or self.servers in (None, traits.num_servers)


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
    weights: tuple[WeightWork, ...] = ()
    """The parameters of `nn.Embedding(sparse=True)`: their rows alone move under strategies that say so."""
    demand: Demand | None = None
    """None: the script takes every strategy."""

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

    def of_batch(self, samples: int, *, step_s: float | None) -> "StepWork":
        """With so many samples: a step takes in proportion. `step_s`: what this one takes, if it does not say."""
        if samples == self.samples:
            return self
        part, own_s = samples / self.samples, step_s if self.step_s is None else self.step_s
        return replace(
            self,
            samples=samples,
            forward_flop=self.forward_flop * part,
            rows=None if self.rows is None else self.rows.of_part(part),
            weights=tuple(each.of_part(part) for each in self.weights),
            step_s=None if own_s is None else own_s * part,
        )

    def by_rows(self, *, on_servers: bool) -> "StepWork":
        """As it is where rows of weights move, be it to servers, as far as these take them. The weights that are left
        are then no part of anything else."""
        weights = tuple(each for each in self.weights if not on_servers or each.update_bytes is not None)
        moved = {each.index for each in weights}
        return replace(
            self,
            tensor_bytes=tuple(1 if index in moved else size for index, size in enumerate(self.tensor_bytes)),
            backward_shares=self.shares,
            state_bytes=self.state_bytes - sum(each.state_bytes for each in weights),
            weights=weights,
        )
