"""Matrices as products of thin ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
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
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (1.32, 0.0)

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
        out: Sequence[Tensor],
        mean: Callable[[Tensor], None],
        left_out: Callable[[], None] = lambda: None,
    ) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        forms, is_coded = self._matrices(shapes), [self._is_coded(shape) for shape in shapes]
        is_plain = [not each for each in is_coded]
        coded, plain = list(compress(tensors, is_coded)), list(compress(tensors, is_plain))
        # Views where tensors are float32: a model's gradients are larger than caches, and each pass over them counts.
        matrices = [_matrix(tensor).float() for tensor in coded]
        lefts = [matrix @ _orthonormal(right) for matrix, right in zip(matrices, _cut(kept, forms, 1), strict=True)]
        first = torch.cat([tensor.float().view(-1) for tensor in (*lefts, *plain)])
        for tensor in plain:
            tensor.zero_()
        if not matrices:
            left_out()
        mean(first)
        lefts = [_orthonormal(left) for left in _cut(first, forms, 0)]
        if matrices:
            rights = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
            # Each worker owes what its own matrix lacks: what the mean lacks is partly owed by others, who may be gone.
            for tensor, matrix, left, right in zip(coded, matrices, lefts, rights, strict=True):
                matrix.addmm_(left, right.T, alpha=-1)
                if matrix.dtype is not tensor.dtype:
                    _matrix(tensor).copy_(matrix)
            left_out()
            kept = torch.cat([right.reshape(-1) for right in rights])
            mean(kept)
        for target, left, right in zip(compress(out, is_coded), lefts, _cut(kept, forms, 1), strict=True):
            _multiply(left, right.T, out=_matrix(target))
        plains = first[sum(left.numel() for left in lefts) :].split([tensor.numel() for tensor in plain])
        for target, each in zip(compress(out, is_plain), plains, strict=True):
            target.copy_(each.view(target.shape))
        return kept

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


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(_as_matrix(tuple(tensor.shape)))


def _multiply(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    if out.dtype is left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _cut(flat: Tensor, forms: Sequence[tuple[int, int, int]], side: int) -> list[Tensor]:
    """The thin matrices of one side (0 for the lefts, of as many rows as the matrix; 1 for the rights, of as many rows
    as it has columns), which lie one behind the other at the beginning."""
    sizes = [form[side] * form[2] for form in forms]
    parts = flat[: sum(sizes)].split(sizes) if sizes else ()
    return [part.view(form[side], form[2]) for part, form in zip(parts, forms, strict=True)]


def _orthonormal(matrix: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis
