"""Models and optimizers that nobody's tutorial has, for the rows of `test_odd_models`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from tests.conformance.scripts import NUM_CLASSES, momentum, perceptron

Batch = Any


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# --- models ---------------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A perceptron, and something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8, dtype=torch.complex128)
        self.last = nn.Linear(8, NUM_CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x.flatten(1).to(torch.complex128)).abs())


class Masked(Around):
    """Buffers that no worker may change, among them numbers that cannot be added up."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"least_{name}", torch.full((4,), torch.finfo(dtype).min, dtype=dtype))
            self.register_buffer(f"third_{name}", torch.full((4,), 1 / 3, dtype=dtype))
        self.register_buffer("infinite", torch.tensor([torch.inf, -torch.inf]))
        self.register_buffer("complex", torch.tensor([1 + 2j]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(2**62))
        self.register_buffer("none", None)


class ReplacesBuffers(Around):
    """A mean of what went by and a count, each kept in a new tensor after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            self.count = self.count + 1
        return self.net(x) + self.mean.tanh()


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.middle = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.last = nn.Linear(16, NUM_CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x.flatten(1).float())).bfloat16()))
        return self.last(hidden.double())


class Empty(Around):
    """Parameters without elements, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 5, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(3, 0, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.net(x) * self.scale + self.none.sum() + self.nothing.sum()


class Strided(nn.Module):
    """Parameters that are transposed, and every other column."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Parameter(torch.randn(64, 12, generator=generator, dtype=torch.float64).t() * 0.1)
        self.last = nn.Parameter(torch.randn(12, 8, generator=generator, dtype=torch.float64)[:, ::2] * 0.1)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x.flatten(1) @ self.first.t()) @ self.last


class Slices(nn.Module):
    """Two parameters in one tensor's memory, beside each other."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(544, generator=generator, dtype=torch.float64) * 0.1
        self.first, self.last = nn.Parameter(whole[:512].view(8, 64)), nn.Parameter(whole[512:].view(4, 8))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x.flatten(1) @ self.first.t()) @ self.last.t()


def channels_last() -> nn.Module:
    layers = (nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(128, NUM_CLASSES))
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def reparametrized() -> nn.Module:
    first = parametrizations.weight_norm(nn.Linear(64, 16))
    last = parametrizations.spectral_norm(nn.Linear(16, NUM_CLASSES))
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), last).double()


def pruned() -> nn.Module:
    model = perceptron()
    prune.l1_unstructured(model[1], "weight", 0.5)  # type: ignore[no-untyped-call]
    return model


class Checkpointed(nn.Module):
    """Computes a part anew in backward: the middle one, twice, or all but the first layer."""

    def __init__(self, *, reentrant: bool, part: str = "middle") -> None:
        super().__init__()
        self.reentrant, self.part = reentrant, part
        self.first, self.middle = (nn.Linear(size, 16, dtype=torch.float64) for size in (64, 16))
        self.last = nn.Linear(16, NUM_CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x.flatten(1)))
        again = partial(checkpoint, use_reentrant=self.reentrant)
        if self.part == "rest":
            return again(lambda hidden: self.last(torch.tanh(self.middle(hidden))), hidden)
        for _ in range(2 if self.part == "shared" else 1):
            hidden = again(lambda hidden: torch.tanh(self.middle(hidden)), hidden)
        return self.last(hidden)


class Distilled(Around):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = perceptron().requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.net(x), taught


class Averaging(Around):
    """Keeps an average of its weights in a buffer, and one in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.cat([p.detach().flatten() for p in self.net.parameters()]))
        self.averaged = AveragedModel(self.net).requires_grad_(False)


class Embedded(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 8, mode="sum", dtype=torch.float64, **settings)
        self.last = nn.Linear(8, NUM_CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.table((x.flatten(1) * 10).long() % 50) / 64)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, 16, dtype=torch.float64)
        self.classes = nn.Linear(16, NUM_CLASSES, dtype=torch.float64)
        self.value = nn.Linear(16, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.trunk(x.flatten(1)))
        return self.classes(hidden), self.value(hidden)


class TiedByMemory(nn.Module):
    """Two parameters that are one tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, dtype=torch.float64) for _ in range(2))
        self.second.weight = nn.Parameter(self.first.weight.data)
        self.last = nn.Linear(64, NUM_CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Aliased(Around):
    """What is computed with is the memory of a parameter: a buffer, or a plain attribute."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        weight = self.net.get_parameter("3.weight").detach()
        if buffer:
            self.register_buffer("alias", weight, persistent=False)
        else:
            self.alias = weight

    def forward(self, x: Tensor) -> Any:
        return self.net(x) + self.alias.sum(1)


class SparseBuffer(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(NUM_CLASSES, dtype=torch.float64).to_sparse())


class KeepsInput(Around):
    """A buffer of another shape on every worker, when the last batch is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        self.last = x.detach().flatten()
        return self.net(x)


class InitialisedByData(Around):
    """Sets a parameter in its first forward pass, as activation normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(NUM_CLASSES, dtype=torch.float64))
        self.register_buffer("is_initialised", torch.tensor(False))

    def forward(self, x: Tensor) -> Any:
        if not self.is_initialised:
            with torch.no_grad():
                self.scale.fill_(2.0)
                self.is_initialised.fill_(True)
        return self.net(x) * self.scale


class Sign(torch.autograd.Function):
    """Straight-through: its gradient is the one that comes in."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Quantised(Around):
    def forward(self, x: Tensor) -> Any:
        output = self.net(x)
        return Sign.apply(output) + output


class Adapted(Around):
    """A frozen model with a low-rank addition (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.down = nn.Parameter(torch.ones(2, 64, dtype=torch.float64) * 0.01)
        self.up = nn.ParameterDict({"classes": nn.Parameter(torch.zeros(NUM_CLASSES, 2, dtype=torch.float64))})

    def forward(self, x: Tensor) -> Any:
        return self.net(x) + x.flatten(1) @ self.down.t() @ self.up["classes"].t()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 4, 1, batch_first=True, dtype=torch.float64)
        self.last = nn.Linear(4, NUM_CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.layers(x.squeeze(1))[0][:, -1])


# --- optimizers -----------------------------------------------------------------------------------------------------


class SharpnessAware(Optimizer):
    """Foret et al., ICLR 2021, as scripts have it: a second gradient where the first one leads uphill."""

    def __init__(self, params: Any, lr: float, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)

    @torch.no_grad()
    def first_step(self) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["place"] = p.detach().clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["place"])
        self.inner.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


class Signed(Optimizer):
    """An optimizer of the script's own, with the interface of torch's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(torch.sign(0.9 * mean + 0.1 * p.grad), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)
        return loss


def hooked(params: Any) -> Optimizer:
    optimizer = momentum(params)
    optimizer.register_step_pre_hook(halve_gradients)
    return optimizer


def halve_gradients(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)
