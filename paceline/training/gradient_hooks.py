"""Notices a script's hooks on gradients that do to each worker's own gradient what one process does to the mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.buckets import is_own_hook
from paceline.errors import UsageError
from paceline.hooks import Telling

_TOLERANCE = 1e-2
_NUM_LOOKS = 16
"""Calls after which a hook that has changed no gradient is taken for one that only looks."""


@final
class GradientHooks:
    """Tries, once, each hook of a parameter that gives another gradient than it was given.

    Workers average gradients after a script's hooks. That is what one process does where a hook is linear, as scaling
    and masking are; clipping is not. A hook that only looks is called as often as the script expects.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, rank: int) -> None:
        self._named, self._rank = list(named_parameters), rank
        self._known: set[int] = set()  # what torch calls the hooks that have been seen

    def watch(self) -> None:
        """Have the hooks that are new be tried when they are called next."""
        for name, parameter in self._named:
            self._watch(parameter._backward_hooks, partial(_try_on_gradient, name=name, rank=self._rank))
            self._watch(parameter._post_accumulate_grad_hooks, partial(_try_on_parameter, name=name, rank=self._rank))

    def _watch(self, hooks: dict[int, Any] | None, trial: Callable[..., Any]) -> None:
        for key, hook in (hooks or {}).items():
            if key not in self._known and not is_own_hook(hook) and hooks is not None:
                self._known.add(key)
                hooks[key] = _Until(partial(trial, hook), hook, hooks, key)


@final
class _Until:
    """Stands in a hook's place until a trial has been made of it: torch looks up hooks whenever it calls them."""

    def __init__(self, trial: Callable[[Any], tuple[Any, bool]], hook: Any, hooks: dict[int, Any], key: int) -> None:
        self._trial, self._hook, self._hooks, self._key = trial, hook, hooks, key
        self._num_calls, self._tell = 0, Telling()

    def __call__(self, given: Tensor) -> Any:
        self._num_calls += 1
        with self._tell:
            result, is_tried = self._trial(given)
        is_tried = is_tried or self._num_calls == _NUM_LOOKS
        if is_tried and self._key in self._hooks:  # the script may have removed it meanwhile
            self._hooks[self._key] = self._hook
        return result


def _try_on_gradient(
    hook: Callable[[Tensor], Tensor | None], gradient: Tensor, *, name: str, rank: int
) -> tuple[Tensor | None, bool]:
    """A hook that `register_hook` was given. Returns what it returns, and whether it has shown what it does."""
    given, version = gradient.detach().clone(), gradient._version
    result = hook(gradient)
    if result is None and gradient._version == version:
        return None, False

    def of_other(other: Tensor) -> Tensor:
        changed = hook(other)
        return other if changed is None else changed.detach()

    return result, _is_linear(of_other, given, (gradient if result is None else result).detach(), name=name, rank=rank)


def _try_on_parameter(
    hook: Callable[[Tensor], object], parameter: Tensor, *, name: str, rank: int
) -> tuple[None, bool]:
    """A hook that `register_post_accumulate_grad_hook` was given."""
    given = None if parameter.grad is None else parameter.grad.detach().clone()
    hook(parameter)
    result = parameter.grad
    if given is None or result is None or _is_same(given, result):
        return None, False

    def of_other(other: Tensor) -> Tensor:
        parameter.grad = other
        hook(parameter)
        return other if parameter.grad is None else parameter.grad.detach()

    try:
        return None, _is_linear(of_other, given, result.detach().clone(), name=name, rank=rank)
    finally:
        parameter.grad = result


def _is_linear(of_other: Callable[[Tensor], Tensor], given: Tensor, result: Tensor, *, name: str, rank: int) -> bool:
    """Whether the hook adds to a gradient far from this one what it adds to none; false where nothing can be told.

    Raises:
        UsageError: it does something else.
    """
    values, rows = given, None
    if given.is_sparse:
        given = given.coalesce()
        values, rows = given.values(), given.indices()[0].unique()
    largest = float(values.abs().max()) if values.is_floating_point() and values.numel() else 0.0
    if not 0.0 < largest < math.inf:
        return False
    far = torch.full_like(values, largest / math.sqrt(torch.finfo(values.dtype).eps))
    far.view(-1)[::2].neg_()
    others = values + far, far.clone(), torch.zeros_like(values)
    together, alone, of_nothing = (_in_rows(of_other(_with_values(given, other)), rows) for other in others)
    distance = float(((together - alone) - (_in_rows(result, rows) - of_nothing)).abs().max())
    rounding = 8 * torch.finfo(values.dtype).eps * float(together.abs().max() + _in_rows(result, rows).abs().max())
    if distance <= _TOLERANCE * largest + rounding:
        return True
    raise UsageError(
        f"rank {rank}: a hook of the script on the gradient of {name!r} clips it, or does something else to it that is "
        "not linear, and would do so to each worker's own gradient before workers average them; do it to the mean, "
        "between loss.backward() and optimizer.step()"
    )


def _with_values(given: Tensor, values: Tensor) -> Tensor:
    """Another gradient of the same rows, if it is one of rows."""
    if not given.is_sparse:
        return values
    return torch.sparse_coo_tensor(given.indices(), values, given.shape, is_coalesced=True, check_invariants=False)


def _in_rows(gradient: Tensor, rows: Tensor | None) -> Tensor:
    """As a dense tensor; of a table that may be larger than what a step has memory for, some rows."""
    some = gradient if rows is None else gradient.index_select(0, rows)
    return some.to_dense()


def _is_same(one: Tensor, other: Tensor) -> bool:
    if not one.is_sparse or not other.is_sparse:
        return torch.equal(one.to_dense(), other.to_dense())
    one, other = one.coalesce(), other.coalesce()
    return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())
