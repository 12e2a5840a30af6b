"""Gradients that are not finite, where each worker takes its own steps."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from paceline.nn.sharded_embedding import ShardedEmbedding
from paceline.strategies.base import NonFinitePolicy, Synchronizer, non_finite
from paceline.strategies.replica import Replica, is_skipped_by_scaler

_MANY = 2**14  # elements: a sum of so many takes less than a look at each, and of fewer its call takes more
_one, _found = (make((), device="cpu", dtype=torch.float32) for make in (torch.ones, torch.zeros))
_is_found = _found.numpy()  # the same memory, which Python reads without a call of torch


def step_alone(
    synchronizer: Synchronizer, update: Callable[[], object], policy: NonFinitePolicy, *, step: int, counts: bool = True
) -> bool:
    """Take this worker's own step with its own gradients, unless one of them is not finite and the policy says `skip`.

    Args:
        update: the script's optimizer step.
        step: its number, for the error.
        counts: false: the gradients are looked at, and no step is taken.

    Returns:
        Whether the optimizer has stepped.

    Raises:
        NonFiniteGradient: a gradient is not finite and the policy says `raise`.
    """
    replica = synchronizer.replica
    if not synchronizer.gradients_are_spent and policy != "allow":
        # As `may_step` looks, whose call it saves where all is well.
        is_well = not replica.tables and _seem_finite(replica.parameters, are_real_on_cpu=replica.is_real_on_cpu)
        if not is_well and not may_step(replica, policy, rank=synchronizer.context.rank, step=step):
            return False
    if not counts:
        return False
    update()
    return getattr(replica.optimizer, "found_inf", None) is None or not is_skipped_by_scaler(replica.optimizer)


def may_step(replica: Replica, policy: NonFinitePolicy, *, rank: int, step: int) -> bool:
    """Whether the optimizer is to step with the gradients that it has. Raises NonFiniteGradient if one is not finite
    and the policy says `raise`."""
    if policy == "allow":
        return True
    culprit = nonfinite_row(replica.tables) if replica.tables else None
    if culprit is None:
        if _seem_finite(replica.parameters, are_real_on_cpu=replica.is_real_on_cpu):
            return True
        culprit = _nonfinite_parameter(replica)
    if is_skipped_by_scaler(replica.optimizer):
        return True  # a scaler skips by itself
    if culprit is not None and policy == "raise":
        raise non_finite(rank=rank, step=step, parameter=culprit)
    return culprit is None


def nonfinite_row(tables: Iterable[ShardedEmbedding]) -> str | None:
    """A row whose gradient is NaN or infinite, in words; none if there is none."""
    return next((row for table in tables if (row := table.find_nonfinite()) is not None), None)


def checked(
    closure: Callable[[], Any], replica: Replica, policy: NonFinitePolicy, *, rank: int, step: int
) -> Callable[[], Any]:
    """The closure of an optimizer that calls it within its step, for one that is to see finite gradients alone: half a
    step cannot be left out, so that `skip` raises, too."""

    def evaluate() -> Any:
        loss = closure()
        may_step(replica, "allow" if policy == "allow" else "raise", rank=rank, step=step)
        return loss

    return evaluate


def _seem_finite(parameters: Iterable[Tensor], *, are_real_on_cpu: bool) -> bool:
    """Whether all of their gradients are finite; false also where a sum or norm of those overflows."""
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        # One that is expanded could not be written.
        if are_real_on_cpu and (gradient.numel() >= _MANY or not gradient.is_contiguous()):
            gradient = gradient.sum()
        gradients.append(gradient)
    if not are_real_on_cpu:
        return not gradients or math.isfinite(get_total_norm(gradients).item())
    # One call for all, which also writes what it reads.
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, _found, _one)
    if not _is_found:
        return True
    _found.zero_()
    return False


def _nonfinite_parameter(replica: Replica) -> str | None:
    """The name of the first one whose gradient is not finite."""
    for parameter, spec in zip(replica.parameters, replica.specs, strict=True):
        gradient = parameter.grad
        if gradient is None:
            continue
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not bool(values.isfinite().all()):
            return spec.name
    return None
