"""Whether all workers are about to step alike."""

import torch
from torch import Tensor

from paceline.buckets import GradientBuckets
from paceline.comm.base import Collective
from paceline.errors import TensorMismatch
from paceline.strategies.digests import digest
from paceline.strategies.meeting import gathered
from paceline.strategies.replica import Replica
from paceline.strategies.settings import first_difference, settings_of


def require_same_steps(
    collective: Collective, replica: Replica, buckets: GradientBuckets, *, are_gradients_alike: bool, step: int
) -> None:
    """Compare optimizers' settings, and gradients where these are one mean that each script has changed. Collective
    call.

    Raises:
        TensorMismatch: on every rank, where they differ.
    """
    said = digest([bucket.flat for bucket in buckets.buckets]) if are_gradients_alike else ""
    everyone = gathered(collective, "a step", [settings_of(replica.optimizer), said])
    difference = first_difference([settings for settings, _ in everyone])
    if difference is not None:
        raise TensorMismatch(
            f"step {step}: {difference}, and servers make one update of all workers' gradients. Compute it "
            "from what all ranks share: worker.metrics, or a loss after worker.all_reduce(loss, op='mean')"
        )
    if len({theirs for _, theirs in everyone}) == 1:
        return
    own = [_is_far_from_first(view, collective) for view in buckets.views]
    for other, is_far in enumerate(collective.all_gather_object(own)):
        if True in is_far:
            raise TensorMismatch(
                f"step {step}: the script has changed the mean gradient of "
                f"{replica.specs[is_far.index(True)].name!r} on rank {other} in another way than on rank 0, "
                "as by its own loss, noise of its own generator, or a gradient that it has computed itself; let "
                "backward() compute it, change it by what worker.all_reduce has given all, and give a "
                "torch.Generator the same seed on every rank, or use --option combine=never to change each "
                "worker's own"
            )


def _is_far_from_first(gradient: Tensor, collective: Collective) -> bool:
    """Whether it differs from rank 0's by more than processors of different kinds round. Collective call."""
    if not gradient.numel():
        return False
    first = gradient.clone()
    collective.broadcast(first)
    if not first.isfinite().all():
        return False
    bound = torch.finfo(first.dtype).eps ** 0.5 * float(first.abs().max())
    return not float((gradient - first).abs().max()) <= bound
