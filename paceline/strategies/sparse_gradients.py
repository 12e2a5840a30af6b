"""Gradients of a few rows of a parameter, as of `nn.Embedding(sparse=True)`: workers exchange these rows alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from paceline.arrays import is_finite
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.strategies.looks import version_of
from paceline.strategies.meeting import gathered
from paceline.strategies.replica import Replica

_NONE, _ROWS, _WHOLE = 0, 1, 2
"""What a worker has of a parameter's gradient."""
_HALF = (torch.float16, torch.bfloat16)
_GRADIENT: Any = Tensor.grad
_grad_of = _GRADIENT.__get__  # which `GradientReads` does not take for a read of the script's


class Rows(NamedTuple):
    """The rows of a gradient that are not zero."""

    keys: Tensor
    """int64 of shape (rows,), in order."""
    values: Tensor
    """Shape (rows, dim)."""


@final
class SparseGradients:
    """Those of a replica's parameters that move by rows; they stay where backward leaves them.

    A script that uses such a parameter in another way, too, has gradients that are dense; so they are then averaged.

    Args:
        whose: says of which of the run's optimizers they are, and its name, if there are several.
    """

    def __init__(
        self, replica: Replica | None = None, *, whose: Callable[[], tuple[int, str]] = lambda: (0, "")
    ) -> None:
        self._whose = whose
        self._parameters: dict[str, nn.Parameter] = {}
        """By name."""
        if replica is not None:
            self._parameters = {replica.specs[at].name: replica.parameters[at] for at in sorted(replica.by_rows)}

    def versions(self) -> list[object]:
        """Other ones wherever somebody has changed a gradient, or put another one in its place."""
        gradients = map(_grad_of, self._parameters.values())
        return [None if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]

    def rescale(self, factor: float) -> None:
        for gradient in map(_grad_of, self._parameters.values()):
            if gradient is not None:
                gradient.mul_(factor)

    def find_nonfinite(self) -> str | None:
        """The name of a parameter whose gradient holds NaN or infinity."""
        for name, parameter in self._parameters.items():
            gradient = _grad_of(parameter)
            if gradient is not None and not is_finite(gradient._values() if gradient.is_sparse else gradient):
                return name
        return None

    def average(self, collective: Collective, *, weight: float) -> None:
        """Replace gradients by the mean over all workers of gradients times weights. Collective call. Raises UsageError
        as `rows_of`, and, on all, where a worker averages those of another optimizer."""
        if not self._parameters:
            return
        parameters = list(self._parameters.values())
        told, (number, title) = collective.all_gather(self._told(weight)), self._whose()
        if any(_number_in(raw) != number for raw in told):
            gathered(collective, f"a backward pass of {title!r}")
        everyone = [_read(raw, parameters) for raw in told]
        for at, parameter in enumerate(parameters):
            theirs = [each[at] for each in everyone]
            forms = {form for form, _ in theirs}
            if _WHOLE in forms:
                own = _grad_of(parameter)
                whole = torch.zeros_like(parameter) if own is None else own.to_dense().clone()
                collective.all_reduce(whole.mul_(weight), op="mean").wait()
                parameter.grad = whole
            elif _ROWS in forms:
                parameter.grad = _mean([rows for form, rows in theirs if form == _ROWS], parameter, collective.size)

    def _told(self, weight: float) -> Tensor:
        """As bytes, what the others need of each gradient: of a dense one nothing but that it is dense. Ahead of that,
        whose they are."""
        heads: list[int] = [self._whose()[0]]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for name, parameter in self._parameters.items():
            gradient = _grad_of(parameter)
            if gradient is None or not gradient.is_sparse:
                heads += [_NONE if gradient is None else _WHOLE, 0]
                continue
            own = rows_of(gradient, name=name)
            heads += [_ROWS, len(own.keys)]
            keys.append(own.keys)
            values.append(own.values if weight == 1.0 else own.values * weight)
        device = next(iter(self._parameters.values())).device
        return torch.cat([_bytes(each) for each in (torch.tensor(heads, device=device), *keys, *values)])


def rows_of(gradient: Tensor, *, name: str) -> Rows:
    """Raises UsageError, which names the parameter, for a gradient that nobody exchanges."""
    if gradient.requires_grad or gradient.layout not in (torch.strided, torch.sparse_coo):
        kind = "has a history (create_graph=True)" if gradient.requires_grad else f"is {gradient.layout}"
        raise UsageError(f"the gradient of {name!r} {kind}; only plain dense and sparse_coo ones are exchanged")
    if not gradient.is_sparse or gradient.sparse_dim() != 1:
        gradient = gradient.to_dense().to_sparse(1)
    gradient = gradient.coalesce()
    return Rows(gradient.indices()[0], gradient.values())


def _number_in(raw: Tensor) -> int:
    """The number of the optimizer that a worker has told of."""
    return int(raw[:8].clone().view(torch.int64))


def _read(raw: Tensor, parameters: Sequence[nn.Parameter]) -> list[tuple[int, Rows]]:
    """What a worker has told."""
    start = 8 + 16 * len(parameters)
    heads = raw[8:start].clone().view(torch.int64).view(-1, 2).tolist()
    keys: list[Tensor] = []
    for _, count in heads:
        keys.append(raw[start : start + 8 * count].clone().view(torch.int64))
        start += 8 * count
    found: list[tuple[int, Rows]] = []
    for (form, count), own, parameter in zip(heads, keys, parameters, strict=True):
        num_bytes = count * (parameter.nbytes // len(parameter))
        values = raw[start : start + num_bytes].clone().view(parameter.dtype).view(count, *parameter.shape[1:])
        start += num_bytes
        found.append((form, Rows(own, values)))
    return found


def _mean(theirs: Sequence[Rows], parameter: nn.Parameter, num_workers: int) -> Tensor:
    """Summed in the workers' order, which is the same on all of them."""
    keys, values = torch.cat([rows.keys for rows in theirs]), torch.cat([rows.values for rows in theirs])
    wide = values.float() if values.dtype in _HALF else values
    shape, dtype = parameter.shape, parameter.dtype
    total = torch.sparse_coo_tensor(keys[None], wide / num_workers, shape, check_invariants=False).coalesce()
    return torch.sparse_coo_tensor(
        total.indices(), total.values().to(dtype), shape, is_coalesced=True, check_invariants=False
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
