"""How a table's rows are updated: each by its own gradient and state, and only when it has a gradient."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast, final

from torch import Tensor

from paceline.pieces import Piece, read

Width = Literal["element", "row"]


class RowOptimizer(Piece, ABC):
    """A frozen description. What it keeps of a row it is given, and changes in place."""

    may_change_lr: ClassVar[bool] = True
    """Whether what it keeps means the same with another learning rate."""
    lr: float

    @property
    def state(self) -> Mapping[str, tuple[Width, float]]:
        """By name, whether it is one number an element or one a row, and what it begins with."""
        return {}

    @abstractmethod
    def step(self, rows: Tensor, gradients: Tensor, state: Mapping[str, Tensor], *, number: int) -> None:
        """Update these rows in place.

        Args:
            rows, gradients: shape (rows, dim).
            state: of these rows, shape (rows, dim) or (rows, 1).
            number: of the table's update, from 1, whichever rows it is of.
        """


def with_lr(optimizer: RowOptimizer, lr: float | None) -> RowOptimizer:
    """The same with another learning rate; none: its own. Raises ValueError if there can be none."""
    if lr is None or lr == optimizer.lr:
        return optimizer
    if type(lr) not in (int, float):
        raise ValueError(f"lr must be a number, not {lr!r}")
    if not optimizer.may_change_lr:
        raise ValueError(f"what {optimizer} keeps of a row is of its own lr, which stays")
    changed: RowOptimizer = replace(cast(Any, optimizer), lr=lr)
    return changed


def of_text(text: str) -> RowOptimizer:
    """The one of a text such as `adagrad:lr=0.1`. Raises UsageError if there is none."""
    return read(RowOptimizer, text)  # type: ignore[type-abstract]


@final
@dataclass(frozen=True)
class SGD(RowOptimizer, name="sgd"):
    """Plain gradient descent."""

    lr: float = 0.01

    def __post_init__(self) -> None:
        _require(lr=self.lr)

    def step(self, rows: Tensor, gradients: Tensor, state: Mapping[str, Tensor], *, number: int) -> None:
        rows.add_(gradients, alpha=-self.lr)


@final
@dataclass(frozen=True)
class Adagrad(RowOptimizer, name="adagrad"):
    """As `torch.optim.Adagrad` with sparse gradients (Duchi, Hazan and Singer, JMLR 2011)."""

    lr: float = 0.01
    initial: float = 0.0
    """Where the sums of squares begin (`initial_accumulator_value`)."""
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _require(lr=self.lr, eps=self.eps, initial=self.initial)

    @property
    def state(self) -> Mapping[str, tuple[Width, float]]:
        return {"sum": ("element", self.initial)}

    def step(self, rows: Tensor, gradients: Tensor, state: Mapping[str, Tensor], *, number: int) -> None:
        total = state["sum"].addcmul_(gradients, gradients)
        rows.addcdiv_(gradients, total.sqrt().add_(self.eps), value=-self.lr)


@final
@dataclass(frozen=True)
class RowWiseAdagrad(RowOptimizer, name="row-wise-adagrad"):
    """Adagrad with one sum a row, of the mean of its gradient's squares: a state of 4 bytes a row.

    Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning recommendation
    models", ISCA 2022, section 4.
    """

    lr: float = 0.01
    initial: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _require(lr=self.lr, eps=self.eps, initial=self.initial)

    @property
    def state(self) -> Mapping[str, tuple[Width, float]]:
        return {"sum": ("row", self.initial)}

    def step(self, rows: Tensor, gradients: Tensor, state: Mapping[str, Tensor], *, number: int) -> None:
        total = state["sum"].add_(gradients.square().mean(dim=1, keepdim=True))
        rows.addcdiv_(gradients, total.sqrt().add_(self.eps), value=-self.lr)


@final
@dataclass(frozen=True)
class Adam(RowOptimizer, name="adam"):
    """As `torch.optim.SparseAdam`: moments of rows without a gradient stand still, and the number of the update, which
    corrects their bias, is the table's (Kingma and Ba, ICLR 2015)."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _require(lr=self.lr, eps=self.eps, beta1=self.beta1, beta2=self.beta2)
        if self.beta1 >= 1 or self.beta2 >= 1:
            raise ValueError(f"beta1 and beta2 must be below 1, not {self.beta1} and {self.beta2}")

    @property
    def state(self) -> Mapping[str, tuple[Width, float]]:
        return {"mean": ("element", 0.0), "square": ("element", 0.0)}

    def step(self, rows: Tensor, gradients: Tensor, state: Mapping[str, Tensor], *, number: int) -> None:
        mean = state["mean"].add_(gradients - state["mean"], alpha=1 - self.beta1)
        square = state["square"].add_(gradients.square() - state["square"], alpha=1 - self.beta2)
        size = self.lr * math.sqrt(1 - self.beta2**number) / (1 - self.beta1**number)
        rows.addcdiv_(mean, square.sqrt().add_(self.eps), value=-size)


@final
@dataclass(frozen=True)
class FTRL(RowOptimizer, name="ftrl"):
    """FTRL-Proximal, an element at a time (McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013,
    algorithm 1): with `l1` above 0, elements that matter little become exactly 0."""

    may_change_lr: ClassVar[bool] = False
    lr: float = 0.1
    """Alpha there."""
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        _require(lr=self.lr, beta=self.beta, l1=self.l1, l2=self.l2)
        if not self.lr or not self.beta:
            raise ValueError("lr and beta must be above 0")

    @property
    def state(self) -> Mapping[str, tuple[Width, float]]:
        return {"z": ("element", 0.0), "n": ("element", 0.0)}

    def step(self, rows: Tensor, gradients: Tensor, state: Mapping[str, Tensor], *, number: int) -> None:
        z, n = state["z"], state["n"]
        root = n.sqrt()
        n.addcmul_(gradients, gradients)
        sigma = (n.sqrt() - root) / self.lr
        z.add_(gradients).sub_(sigma * rows)
        strength = (self.beta + n.sqrt()) / self.lr + self.l2
        rows.copy_(((self.l1 - z.abs()).clamp(max=0) * z.sign()) / strength)


def _require(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
