"""What workers ask of servers, and what servers say."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from paceline.aggregate import MEAN, Aggregator, ContributionKind
from paceline.codec import TensorCodec
from paceline.elastic import Done
from paceline.layout import Layout
from paceline.server.admission import AdmissionRule
from paceline.server.ranges import KeyRange
from paceline.server.tables.storage import TableFiles
from paceline.server.whole_updates import Share, Took


@dataclass(frozen=True)
class OptimizerSpec:
    """What a server needs to build an optimizer: the worker's, or an outer one."""

    optimizer_class: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    """What the optimizer was constructed with."""
    groups: tuple[Mapping[str, Any], ...]
    """Hyperparameters of each parameter group, without its parameters."""
    element_wise: bool
    """Whether an update of one element depends on that element alone, so that tensors may be cut."""


@dataclass(frozen=True)
class ServerSpec:
    """What one server is to own, and how it joins and applies what is pushed."""

    layout: Layout
    pieces: KeyRange
    optimizer: OptimizerSpec
    rule: AdmissionRule
    max_updates: int | None
    aggregator: Aggregator = MEAN
    codec: TensorCodec | None = None
    """Of what workers elsewhere push."""
    number: int = 0
    """Of the run's optimizer that it is for."""
    table_files: TableFiles | None = None
    """For rows of tables; none: they lie in memory."""
    outlives_workers: bool = False
    """Workers may die, and come, while others train: what one pushes counts whole or not at all, and none makes an
    update itself, in the midst of which it might die."""
    is_copied_apart: bool = False
    """Copies of key ranges are on several hosts: not all of them reach the memory of a worker."""

    def anew(self) -> "ServerSpec":
        """What another copy of the key range is built by, with a rule of its own."""
        return replace(self, rule=self.rule.for_another_shard())


class Push(NamedTuple):
    """One contribution to the worker's current clock."""

    pause_at: int
    """Answer, admitted or not, once the servers' iteration is this far: all workers then meet."""
    void: bool = False
    """No gradient this time (it was not finite, or the scaler skipped it)."""
    stop: bool = False
    """Ask every worker to stop after this iteration."""
    groups: tuple[Mapping[str, Any], ...] | None = None
    """Hyperparameters of the groups, when they changed since the last push."""
    sender: int | None = None
    """Whom the worker pushes for; none: for itself."""
    weight: float = 1.0
    """Of the contribution among the others of its update; above 0."""
    kind: ContributionKind = "gradient"
    """A delta is what the worker's parameters are, less what they were when it got them."""
    done: Done | None = None
    """What the worker has done when this counts, where others may have to take over the rest."""
    share: Share | None = None
    """What it has of the samples of its update, where that may take several rounds; none: each clock is one."""
    is_last: bool = False
    """The worker leaves others when this counts, and owes nothing then: it goes without a codec, together with what
    codecs have left out of pushes before."""

    @property
    def stands_in(self) -> bool:
        """Whether it has no samples of its update, so that its gradient, if there is one, is of another's."""
        return self.share is not None and not self.share.num_samples

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing but a gradient, and what the worker has done."""
        return not (self.void or self.stop or self.groups or self.sender is not None or self.share) and (
            self.weight == 1.0 and self.kind == "gradient"
        )


class Reply(NamedTuple):
    """What the servers say to one push and pull."""

    iteration: int
    """Global updates that the first server has applied."""
    staleness: tuple[int, ...]
    """Per server: updates applied between this worker's last pull and this gradient; -1 where it was not applied, or
    not yet."""
    stop: bool
    """Some worker asked all to stop after this iteration."""
    admitted: bool
    """False: answered for a pause only; call `wait_for_admission` before the next gradient."""
    clock: int = 0
    """Of this worker's next gradient."""
    took: tuple[Took, ...] = ()
    """Where updates take several rounds: whose gradients the round had that is over; or, without a gradient, those of
    all rounds so far."""
