"""Matrices as products of thin ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.codec.base import JointCodec, Shape, doc, drawing
from paceline.errors import UsageError


@final
@dataclass(frozen=True, kw_only=True)
class PowerSGD(JointCodec, name="powersgd"):
    """One step of subspace iteration on the workers' mean, from where the last one ended.

    Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
    NeurIPS 2019, algorithms 1 and 2. A tensor's first dimension is its matrix's rows. Vectors, and matrices that would
    hardly shrink, go as they are. What a worker leaves out is of its own matrix (e in algorithm 2 there), so that it
    owes nothing of others' when these are gone.
    """

    contracts: ClassVar[bool] = True
    feedback: ClassVar[bool] = True
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (2.25, 0.0)

    rank: int = doc(4, "columns of the thin matrices")
    start: int = doc(1000, "steps before the first one that is coded: early gradients need more than a low rank")
    least: float = doc(2.0, "leave tensors alone that would not shrink by this factor")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"rank must be at least 1, not {self.rank}")
        if self.start < 0:
            raise UsageError(f"start must be at least 0, not {self.start}")

    @property
    def shaped(self) -> bool:
        return True

    @property
    def first_step(self) -> int:
        return self.start

    def num_bytes(self, shape: Shape) -> int:
        rows, columns = _as_matrix(shape)
        return 4 * (self._rank(rows, columns) * (rows + columns) if self._is_coded(shape) else rows * columns)

    def begin(self, shapes: Sequence[Shape], like: Tensor, *, seed: int) -> Tensor:
        chance = drawing(seed, torch.device("cpu"))
        count = sum(columns * rank for _, columns, rank in self._matrices(shapes))
        return torch.randn(count, generator=chance).to(like.device)

    def average(
        self,
        tensors: Sequence[Tensor],
        kept: Tensor,
        *,
        mean: Callable[[Tensor], None],
        left_out: Callable[[list[Tensor]], None] = lambda tensors: None,
    ) -> tuple[list[Tensor], Tensor]:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        is_coded = [self._is_coded(shape) for shape in shapes]
        forms = self._matrices(shapes)
        matrices = [
            tensor.reshape(_as_matrix(tuple(tensor.shape))).float()
            for tensor, coded in zip(tensors, is_coded, strict=True)
            if coded
        ]
        plain = [tensor.float() for tensor, coded in zip(tensors, is_coded, strict=True) if not coded]
        rights = [part.view(columns, rank) for part, (_, columns, rank) in _cut(kept, forms, 1)]
        lefts = [matrix @ _orthonormal(right) for matrix, right in zip(matrices, rights, strict=True)]
        first = torch.cat([tensor.reshape(-1) for tensor in (*lefts, *plain)])
        if not matrices:
            left_out([torch.zeros_like(tensor) for tensor in tensors])
        mean(first)
        lefts = [_orthonormal(part.view(rows, rank)) for part, (rows, _, rank) in _cut(first, forms, 0)]
        if matrices:
            rights = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
            # Each worker owes what its own matrix lacks: what the mean lacks is partly owed by others, who may be gone.
            own = iter(m - left @ right.T for m, left, right in zip(matrices, lefts, rights, strict=True))
            rest = (next(own) if coded else torch.zeros_like(t) for t, coded in zip(tensors, is_coded, strict=True))
            left_out([each.view(t.shape).to(t.dtype) for each, t in zip(rest, tensors, strict=True)])
            kept = torch.cat([right.reshape(-1) for right in rights])
            mean(kept)
        rights = [part.view(columns, rank) for part, (_, columns, rank) in _cut(kept, forms, 1)]
        products = iter(left @ right.T for left, right in zip(lefts, rights, strict=True))
        plains = iter(first[sum(left.numel() for left in lefts) :].split([tensor.numel() for tensor in plain]))
        found = [next(products if coded else plains) for coded in is_coded]
        return [each.view(tensor.shape).to(tensor.dtype) for each, tensor in zip(found, tensors, strict=True)], kept

    def _is_coded(self, shape: Shape) -> bool:
        rows, columns = _as_matrix(shape)
        return len(shape) > 1 and self._rank(rows, columns) * (rows + columns) * self.least < rows * columns

    def _rank(self, rows: int, columns: int) -> int:
        return min(self.rank, rows, columns)

    def _matrices(self, shapes: Sequence[Shape]) -> list[tuple[int, int, int]]:
        """Rows, columns and rank of those that are coded."""
        forms = [_as_matrix(shape) for shape in shapes if self._is_coded(shape)]
        return [(rows, columns, self._rank(rows, columns)) for rows, columns in forms]


def _as_matrix(shape: Shape) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _cut(flat: Tensor, forms: Sequence[tuple[int, int, int]], side: int) -> list[tuple[Tensor, tuple[int, int, int]]]:
    """The thin matrices of one side, which lie one behind the other at the beginning, each with its form."""
    sizes = [form[side] * form[2] for form in forms]
    return list(zip(flat[: sum(sizes)].split(sizes), forms, strict=True)) if sizes else []


def _orthonormal(matrix: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis
