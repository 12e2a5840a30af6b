"""Gradients that are not finite, where each worker takes its own steps."""

import math

from torch.nn.utils import get_total_norm

from paceline.strategies.base import NonFinitePolicy, non_finite
from paceline.strategies.replica import Replica, is_skipped_by_scaler


def may_step(replica: Replica, policy: NonFinitePolicy, *, rank: int, step: int) -> bool:
    """Whether the optimizer is to step with the gradients that it has.

    Raises:
        NonFiniteGradient: one is not finite and the policy says `raise`.
    """
    if policy == "allow" or is_skipped_by_scaler(replica.optimizer):
        return True  # a scaler skips by itself
    culprit = _nonfinite_parameter(replica)
    if culprit is not None and policy == "raise":
        raise non_finite(rank=rank, step=step, parameter=culprit)
    return culprit is None


def _nonfinite_parameter(replica: Replica) -> str | None:
    gradients = [parameter.grad for parameter in replica.parameters if parameter.grad is not None]
    # One fused pass over all gradients; the norm may overflow where no gradient does, hence the second look.
    if not gradients or math.isfinite(get_total_norm(gradients).item()):
        return None
    for parameter, spec in zip(replica.parameters, replica.specs, strict=True):
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return spec.name
    return None
