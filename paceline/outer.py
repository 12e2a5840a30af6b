"""How what workers changed is applied to the parameters that they share: pseudo-gradients, and any `torch.optim`.

A pseudo-gradient is what a worker's local steps took off the shared parameters (Reddi et al., "Adaptive federated
optimization", ICLR 2021, section 2). An outer optimizer steps with the mean of all workers' ones.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.errors import UsageError, unknown

_PRESETS: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = {
    "average": (SGD, {"lr": 1.0}),
    "momentum": (SGD, {"lr": 1.0, "momentum": 0.5}),
    "nesterov": (SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
}
_OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam")
}


def named(name: str, *, lr: float | None = None, momentum: float | None = None) -> "partial[Optimizer]":
    """What makes an outer optimizer of parameters: `average`, `momentum`, `nesterov`, or one of `torch.optim`.

    Args:
        lr: none: the optimizer's own.
        momentum: none: the optimizer's own.

    Raises:
        UsageError: there is no such optimizer, a number is out of range, or it has no effect on this optimizer.
    """
    if name not in _PRESETS and name not in _OPTIMIZERS:
        raise unknown("outer optimizer", name, [*_PRESETS, *_OPTIMIZERS])
    if name == "average" and (lr is not None or momentum is not None):
        raise UsageError("outer=average takes the mean as it is; to weigh it use outer=momentum, nesterov or sgd")
    kind, settings = _PRESETS.get(name) or (_OPTIMIZERS[name], {})
    given = {key: value for key, value in (("lr", lr), ("momentum", momentum)) if value is not None}
    for key in given:
        if key not in inspect.signature(kind).parameters:
            raise UsageError(f"outer_{key} has no effect on outer={name}, which has no {key}")
    make = partial(kind, **{**settings, **given})
    try:
        make([torch.zeros(1)])
    except ValueError as error:
        raise UsageError(f"outer={name}: {error}") from None
    return make


@torch.no_grad()
def take_changes(outer: Sequence[Tensor], local: Sequence[Tensor], changes: Sequence[Tensor], *, weight: float) -> None:
    """`changes` become the pseudo-gradients weight * (outer - local), tensor by tensor."""
    torch._foreach_copy_(list(changes), list(outer))
    torch._foreach_sub_(list(changes), list(local))
    if weight != 1.0:
        torch._foreach_mul_(list(changes), weight)


@torch.no_grad()
def mix(local: Sequence[Tensor], outer: Sequence[Tensor], *, alpha: float) -> None:
    """`local` becomes (1 - alpha) outer + alpha local (Douillard et al., "Streaming DiLoCo", 2025, equation 3)."""
    if alpha == 0:
        torch._foreach_copy_(list(local), list(outer))
    elif alpha != 1:
        torch._foreach_lerp_(list(local), list(outer), 1 - alpha)


def dealt_out(sizes: Sequence[int], num_fragments: int) -> list[int]:
    """The fragment of each tensor: the largest first, each to the fragment that has least (Graham, "Bounds on
    multiprocessing timing anomalies", 1969). So all are about as large, and have parts of all depths.

    >>> dealt_out([4, 1, 3, 1], 2)
    [0, 1, 1, 0]
    """
    totals, found = [0] * num_fragments, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = totals.index(min(totals))
        totals[found[index]] += sizes[index]
    return found
