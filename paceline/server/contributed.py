"""The form of what a worker pushes to a shard."""

import math
from collections.abc import Sequence
from typing import get_args

import torch

from paceline.aggregate import Contribution, ContributionKind
from paceline.server.admission import ProtocolError

_KINDS, _NUMBERS = get_args(ContributionKind), (float, int)


def require_form(
    worker: int, sender: object, contribution: Contribution | None, expected: Sequence[torch.Size]
) -> None:
    """Raises ProtocolError for a sender that is no number, and for tensors, a weight or a kind that a shard of these
    shapes does not take. Over the wire each may be of any type."""
    if type(sender) is not int:
        raise ProtocolError(f"worker {worker} pushed for sender {sender!r}, which is no number")
    if contribution is None:
        return
    shapes = [tensor.shape for tensor in contribution.tensors]
    if shapes != expected:
        told, owned = ([tuple(shape) for shape in each] for each in (shapes, expected))
        raise ProtocolError(f"worker {worker} pushed gradients of shapes {told}; this server owns {owned}")
    weight, kind = contribution.weight, contribution.kind
    if kind not in _KINDS or type(weight) not in _NUMBERS or not 0 < weight < math.inf:
        raise ProtocolError(f"worker {worker} pushed a {kind!r} of weight {weight!r}")
