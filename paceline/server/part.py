"""A shard as a server holds it: made from its pieces of the model, and sent in frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.layout import Layout
from paceline.messages import Raw, WireError, to_frames
from paceline.server.admission import AdmissionRule
from paceline.server.closing import Groups
from paceline.server.optimizer import build_optimizer
from paceline.server.ranges import KeyRange
from paceline.server.shard import Shard
from paceline.server.spec import OptimizerSpec, ServerSpec
from paceline.server.standing import of_groups


@dataclass
class Part:
    """One shard of a server, and the message frames that its parameters were last sent in."""

    shard: Shard
    pieces: KeyRange
    groups: list[int]
    """Which of the optimizer's groups the shard has tensors of."""
    tensor_bytes: int
    """Of its parameters, or gradients."""
    frames: list[Raw] | None = None
    frames_iteration: int = 0

    def own_groups(self, given: Sequence[Mapping[str, Any]]) -> Groups:
        """Of all groups' hyperparameters, those of this shard. Raises WireError if they are not of the form in which a
        worker sends them."""
        are_mappings = isinstance(given, list) and all(
            isinstance(each, dict) and "params" not in each for each in given
        )
        if not are_mappings or len(given) <= max(self.groups):
            raise WireError("refused hyperparameters that are not one mapping a group")
        return of_groups([given[group] for group in self.groups])

    def as_frames(self) -> list[Raw]:
        """The parameters as they are now. Sockets read them later, and the next update writes in place: a copy.

        One for all workers: between two updates the parameters do not change.
        """
        if self.frames is None or self.frames_iteration != self.shard.iteration:
            self.frames = [bytes(frame) for frame in to_frames(self.shard.parameters)]
            self.frames_iteration = self.shard.iteration
        return self.frames


def build_part(spec: ServerSpec, pieces: KeyRange, rule: AdmissionRule, memory: Tensor | None) -> Part:
    """A shard of these pieces; its parameters lie in `memory`, laid out like the model, if that is given."""
    optimizer, parameters, groups = build_pieces(spec.layout, pieces, spec.optimizer, memory)
    shard = Shard(
        parameters=parameters,
        optimizer=optimizer,
        rule=rule,
        aggregator=spec.aggregator,
        max_updates=spec.max_updates,
    )
    return Part(shard, pieces, groups, sum(parameter.nbytes for parameter in parameters))


def build_pieces(
    layout: Layout, pieces: KeyRange, spec: OptimizerSpec, memory: Tensor | None
) -> tuple[torch.optim.Optimizer, list[Tensor], list[int]]:
    """An optimizer over these pieces, in `memory` if that is given; the pieces; and which of its groups they are of."""
    segments = layout.segments
    parameters = [
        torch.zeros(
            piece.stop - piece.start if piece.shape is None else piece.shape, dtype=segments[piece.segment].dtype
        )
        if memory is None
        else piece.view(layout, memory)
        for piece in pieces
    ]
    owned: dict[int, list[Tensor]] = {}
    for piece, parameter in zip(pieces, parameters, strict=True):
        owned.setdefault(segments[piece.segment].group, []).append(parameter)
    groups = sorted(owned) or [0]
    optimizer = build_optimizer(
        spec.optimizer_class,
        spec.defaults,
        [spec.groups[group] for group in groups],
        [owned.get(group, []) for group in groups],
    )
    return optimizer, parameters, groups


def require_fitting(spec: ServerSpec, *, num_shards: int) -> None:
    """Raises UsageError, which names the aggregator, if it does not fit."""
    name = type(spec.aggregator).__name__
    if not spec.aggregator.streams and not spec.rule.joins:
        raise UsageError(f"{name} needs several contributions an update, and {type(spec.rule).__name__} gives it one")
    own_bytes = sum(piece.num_bytes(spec.layout) for piece in spec.pieces)
    is_whole = num_shards == 1 and own_bytes >= sum(spec_.num_bytes for spec_ in spec.layout.specs)
    if not spec.aggregator.is_coordinate_wise and not is_whole:
        raise UsageError(f"{name} compares whole contributions: use one server, and an optimizer spec of whole tensors")
