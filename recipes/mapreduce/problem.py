"""Least squares by gradient descent, and the pieces of one step: split, map, reduce, update. NumPy alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = tuple[Array, Array]
"""Inputs of shape (rows, features), and what is to be predicted of them, of shape (rows,)."""


@dataclass(frozen=True)
class Problem:
    """Find `w` that makes the loss, half the mean of (x @ w - y)^2, least."""

    x: Array
    y: Array

    @classmethod
    def made(cls, *, num_rows: int, num_features: int, seed: int = 0) -> "Problem":
        """Normal inputs, a normal `w` and a tenth of noise. Raises ValueError if either number is not positive."""
        if num_rows < 1 or num_features < 1:
            raise ValueError(f"rows and features must be at least 1, not {num_rows} and {num_features}")
        generator = np.random.default_rng(seed)
        x = generator.standard_normal((num_rows, num_features))
        y = x @ generator.standard_normal(num_features) + 0.1 * generator.standard_normal(num_rows)
        return cls(x, y)

    @property
    def num_rows(self) -> int:
        return len(self.y)

    def rate(self) -> float:
        """1 over the loss's largest curvature: the largest rate whose every step is proved to lower the loss."""
        return float(self.num_rows / np.linalg.eigvalsh(self.x.T @ self.x)[-1])

    def start(self) -> Array:
        return np.zeros(self.x.shape[1])

    def loss(self, w: Array) -> float:
        return float(np.mean((self.x @ w - self.y) ** 2) / 2)


def split(problem: Problem, num_tasks: int) -> list[Rows]:
    """Every row once, in order, in parts that differ by one row at most. Raises ValueError if one would be empty."""
    if not 1 <= num_tasks <= problem.num_rows:
        raise ValueError(f"{problem.num_rows} rows go to 1 to {problem.num_rows} map tasks, not to {num_tasks}")
    parts = zip(np.array_split(problem.x, num_tasks), np.array_split(problem.y, num_tasks), strict=True)
    return [(x, y) for x, y in parts]


def map_rows(rows: Rows, w: Array) -> Array:
    """A split's part of the gradient: the sum over its rows, of the shape of `w`."""
    x, y = rows
    return x.T @ (x @ w - y)


def reduce_sums(sums: Sequence[Array]) -> Array:
    """The sum, always in the order of the splits, so that a run repeats to the bit."""
    total = sums[0].copy()
    for other in sums[1:]:
        total += other
    return total


def update(w: Array, gradient_sum: Array, *, num_rows: int, rate: float) -> Array:
    return w - rate / num_rows * gradient_sum


def descend(problem: Problem, *, rate: float, num_steps: int) -> Array:
    """Serial gradient descent, which all others must equal to rounding."""
    w = problem.start()
    for _ in range(num_steps):
        w = step(problem, w, rate=rate)
    return w


def step(problem: Problem, w: Array, *, rate: float) -> Array:
    return update(w, map_rows((problem.x, problem.y), w), num_rows=problem.num_rows, rate=rate)


def difference(w: Array, serial: Array) -> float:
    """The largest one, as a part of the largest number of `serial`."""
    return float(np.max(np.abs(w - serial)) / np.max(np.abs(serial)))
