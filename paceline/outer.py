"""How what workers changed is applied to the parameters that they share: pseudo-gradients, and any `torch.optim`.

A pseudo-gradient is what a worker's local steps took off the shared parameters (Reddi et al., "Adaptive federated
optimization", ICLR 2021, section 2). An outer optimizer steps with the mean of all workers' ones.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.errors import UsageError, unknown
from paceline.pieces import Piece


class Outer(Piece, ABC):
    """What steps with the workers' mean pseudo-gradient."""

    by_torch: ClassVar[bool] = True
    """An optimizer of torch's does, which servers can build anew."""

    @abstractmethod
    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The optimizer of the shared parameters."""

    def require_possible(self) -> None:
        """Raises UsageError, which names the piece, for settings with which it trains nothing, or to no end: rates and
        small constants are above 0 and finite, and what moments keep is from 0 to below 1."""
        for field in fields(self):  # type: ignore[arg-type]  # pieces are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            is_kept = field.name.startswith(("beta", "momentum"))
            if not (0 <= value < 1 if is_kept else 0 < value < math.inf):
                wanted = "from 0 to below 1" if is_kept else "a finite number above 0"
                raise UsageError(f"outer={self}: {field.name} is out of range; give {wanted}")

    @final
    def fitting(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gives the state, keyed `<parameter index>.<name>`, if this kind can go on with it, else nothing. Names tell
        kinds apart: those that keep the same (Momentum and Nesterov, Adam and AdamW, FedAdam and FedYogi) go on with
        one another's."""
        left: dict[str, set[str]] = {}
        for key in state:
            index, _, name = key.partition(".")
            left.setdefault(index, set()).add(name)
        own = [self._names((1,)), self._names((1, 1))] if left else []  # Adafactor keeps others of matrices
        return dict(state) if all(names in own for names in left.values()) else {}

    def _names(self, shape: tuple[int, ...]) -> set[str]:
        """Tells under which names this kind keeps state of a parameter of this shape."""
        trial = nn.Parameter(torch.zeros(shape))
        optimizer = self.optimizer([trial])
        trial.grad = torch.zeros(shape)
        optimizer.step()
        return {name for name, value in optimizer.state[trial].items() if value is not None}


@final
@dataclass(frozen=True)
class Average(Outer, name="average"):
    """The mean of the workers' parameters, as it is (local SGD)."""

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=1.0)


@final
@dataclass(frozen=True)
class Momentum(Outer, name="momentum"):
    """Heavy-ball momentum (SlowMo: Wang et al., ICLR 2020, algorithm 1, lines 6 and 7).

    There a change is divided by the inner learning rate and multiplied by it again. Here it is not, which is the same
    as long as that rate stays the same."""

    lr: float = 1.0
    momentum: float = 0.5

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=self.lr, momentum=self.momentum)


@final
@dataclass(frozen=True)
class Nesterov(Outer, name="nesterov"):
    """Nesterov momentum (DiLoCo: Douillard et al., 2023, section 2 and table 5)."""

    lr: float = 0.7
    momentum: float = 0.9

    def require_possible(self) -> None:
        super().require_possible()
        if self.momentum == 0:
            raise UsageError(f"outer={self}: momentum is out of range; give one above 0, or outer=momentum:momentum=0")

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=True)


@final
@dataclass(frozen=True)
class Adam(Outer, name="adam"):
    """Adaptive steps (FedAdam: Reddi et al., ICLR 2021, algorithm 2, here with the bias correction of Adam)."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps)


@dataclass(frozen=True)
class Adaptive(Outer):
    """Steps divided by the root of a second moment, without Adam's bias correction (Reddi et al., ICLR 2021,
    algorithm 2). Moments begin with 0 and tau squared."""

    by_torch: ClassVar[bool] = False

    lr: float = 0.1
    beta1: float = 0.9
    tau: float = 1e-3

    @abstractmethod
    def moment(self, moment: Tensor, squared: Tensor) -> Tensor:
        """The second moment after one more pseudo-gradient, whose square is given."""

    @final
    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return AdaptiveSteps(parameters, self)


@final
@dataclass(frozen=True)
class FedAdam(Adaptive, name="fed-adam"):
    """Adaptive steps with a running mean of squares."""

    beta2: float = 0.99

    def moment(self, moment: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * moment + (1 - self.beta2) * squared


@final
@dataclass(frozen=True)
class FedYogi(Adaptive, name="fed-yogi"):
    """Adaptive steps whose second moment changes by squares' size alone, whichever way."""

    beta2: float = 0.99

    def moment(self, moment: Tensor, squared: Tensor) -> Tensor:
        return moment - (1 - self.beta2) * squared * torch.sign(moment - squared)


@final
@dataclass(frozen=True)
class FedAdagrad(Adaptive, name="fed-adagrad"):
    """Adaptive steps with the sum of all squares."""

    beta1: float = 0.0

    def moment(self, moment: Tensor, squared: Tensor) -> Tensor:
        return moment + squared


@final
class AdaptiveSteps(Optimizer):
    """What `Adaptive` describes."""

    def __init__(self, parameters: list[nn.Parameter], kind: Adaptive) -> None:
        super().__init__(parameters, {"lr": kind.lr})
        self._kind = kind

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it evaluates nothing
        kind = self._kind
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["moment"] = torch.full_like(parameter, kind.tau**2)
                state["mean"].lerp_(parameter.grad, 1 - kind.beta1)
                state["moment"] = kind.moment(state["moment"], parameter.grad.square())
                parameter.sub_(group["lr"] * state["mean"] / (state["moment"].sqrt() + kind.tau))


@final
@dataclass(frozen=True)
class OfTorch(Outer, name="torch"):
    """Any optimizer of `torch.optim`, by its name there."""

    kind: str
    lr: float

    def require_possible(self) -> None:
        super().require_possible()
        if self.kind not in _known():
            raise unknown("optimizer of torch.optim", self.kind, _known())

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return _known()[self.kind](parameters, lr=self.lr)  # type: ignore[call-arg]  # every one of them has it


def _known() -> dict[str, type[Optimizer]]:
    return {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and name not in _UNFIT
    }


_UNFIT = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
"""What is no optimizer, evaluates the model, or takes sparse gradients or matrices alone."""


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

    Raises:
        UsageError: there are fewer tensors than fragments.

    >>> dealt_out([4, 1, 3, 1], 2)
    [0, 1, 1, 0]
    """
    if num_fragments > len(sizes):
        raise UsageError(
            f"fragments must be at most {len(sizes)}, one a trained tensor of the model, not {num_fragments}"
        )
    totals, found = [0] * num_fragments, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = totals.index(min(totals))
        totals[found[index]] += sizes[index]
    return found
