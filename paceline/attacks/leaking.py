"""Gradient leakage: whoever knows the model and sees a gradient recovers the sample that it was computed on."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.pieces import Piece


class Known(NamedTuple):
    """The attacker knows this beside the gradient, or the change, that the client sent."""

    model: nn.Module
    """The model before the client's steps."""
    shape: tuple[int, int, int]
    """Channels, height and width."""
    num_classes: int
    low: Tensor
    """The values of black, of shape (C, 1, 1)."""
    high: Tensor
    steps: int = 1
    """The client's steps, each of its whole data."""
    lr: float = 0.1
    """The client's learning rate."""

    def sent_for(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the client's change over minus its learning rate: the gradient, if it takes one plain step.

        Differentiable in inputs and targets, through all steps.

        Args:
            inputs: of shape (n, C, H, W).
            targets: class indices, or probabilities of shape (n, classes).
        """
        first = {name: parameter.detach().requires_grad_() for name, parameter in self.model.named_parameters()}
        now = first
        for _ in range(self.steps):
            loss = F.cross_entropy(functional_call(self.model, now, (inputs,)), targets)
            gradients = torch.autograd.grad(loss, list(now.values()), create_graph=True)
            now = {name: each - self.lr * g for (name, each), g in zip(now.items(), gradients, strict=True)}
        if self.steps == 1:
            return list(gradients)
        return [(before - after) / self.lr for before, after in zip(first.values(), now.values(), strict=True)]


class Recovered(NamedTuple):
    """What an attack makes of it."""

    inputs: Tensor
    """The inputs that were found, shape (1, C, H, W)."""
    label: int
    mismatch: float
    """How far from what was sent this sample's would be: 0 is a perfect match."""


class Leak(Piece, ABC):
    """Recovers one sample."""

    @abstractmethod
    def recovered(self, sent: Sequence[Tensor], known: Known, *, generator: torch.Generator) -> Recovered:
        """Raises UsageError if the method does not fit the model."""


def label_of(sent: Sequence[Tensor]) -> int:
    """The class of the one sample: of the last layer's biases, its gradient alone is negative (iDLG: Zhao et al., 2020,
    section 3.2)."""
    return int(sent[-1].argmin())


def psnr(image: Tensor, original: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels, of pixels between 0 and 1."""
    return -10 * math.log10(max(float((image - original).square().mean()), 1e-12))


@final
@dataclass(frozen=True)
class Analytic(Leak, name="analytic"):
    """Where the first layer is linear with a bias: the gradient of a unit's weights is its bias's times the sample
    (Geiping et al., NeurIPS 2020, proposition 3.1)."""

    def recovered(self, sent: Sequence[Tensor], known: Known, *, generator: torch.Generator) -> Recovered:
        weights, biases = sent[0], sent[1]
        if weights.dim() != 2 or biases.shape != weights.shape[:1] or weights.shape[1] != math.prod(known.shape):
            raise UsageError("analytic needs a model whose first layer is linear, with a bias; use idlg or inverting")
        unit = int(biases.abs().argmax())
        inputs = (weights[unit] / biases[unit]).view(1, *known.shape)
        label = label_of(sent)
        return Recovered(inputs, label, _distance(known.sent_for(inputs, torch.tensor([label])), sent))


@final
@dataclass(frozen=True)
class Dlg(Leak, name="dlg"):
    """A sample and its label are moved, by L-BFGS, until their gradient is the one that was sent (Deep Leakage from
    Gradients: Zhu et al., NeurIPS 2019, algorithm 1)."""

    iterations: int = 300
    restarts: int = 2

    def recovered(self, sent: Sequence[Tensor], known: Known, *, generator: torch.Generator) -> Recovered:
        def attempt() -> Recovered:
            inputs, logits = _noise(known, generator), torch.randn(1, known.num_classes, generator=generator)
            mismatch = _by_lbfgs(known, sent, inputs, lambda: logits.softmax(-1), [logits], self.iterations)
            return Recovered(inputs.detach(), int(logits.argmax()), mismatch)

        return _best(attempt, self.restarts)


@final
@dataclass(frozen=True)
class Idlg(Leak, name="idlg"):
    """As `Dlg`, with the label read off the last layer first (Improved Deep Leakage from Gradients: Zhao et al.,
    2020)."""

    iterations: int = 300
    restarts: int = 2

    def recovered(self, sent: Sequence[Tensor], known: Known, *, generator: torch.Generator) -> Recovered:
        label = label_of(sent)

        def attempt() -> Recovered:
            inputs, target = _noise(known, generator), torch.tensor([label])
            return Recovered(
                inputs.detach(), label, _by_lbfgs(known, sent, inputs, lambda: target, [], self.iterations)
            )

        return _best(attempt, self.restarts)


@final
@dataclass(frozen=True)
class Inverting(Leak, name="inverting"):
    """A smooth image whose gradient has the same direction, by Adam with signed gradients within the range of pixels
    (Inverting Gradients: Geiping et al., NeurIPS 2020, equation 4)."""

    iterations: int = 600
    restarts: int = 1
    lr: float = 0.1
    smoothness: float = 1e-4
    """The weight of the total variation."""

    def recovered(self, sent: Sequence[Tensor], known: Known, *, generator: torch.Generator) -> Recovered:
        target = torch.tensor([label_of(sent)])

        def attempt() -> Recovered:
            inputs = _noise(known, generator).requires_grad_()
            optimizer = torch.optim.Adam([inputs], lr=self.lr)
            marks = [round(self.iterations * share) for share in (0.375, 0.625, 0.875)]
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks)
            for _ in range(self.iterations):
                loss = _angle(known.sent_for(inputs, target), sent) + self.smoothness * _total_variation(inputs)
                (gradient,) = torch.autograd.grad(loss, [inputs])
                inputs.grad = gradient.sign()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    inputs.copy_(inputs.clamp(known.low, known.high))
            mismatch = float(_angle(known.sent_for(inputs, target), sent).detach())
            return Recovered(inputs.detach(), int(target), mismatch)

        return _best(attempt, self.restarts)


def _best(attempt: Callable[[], Recovered], times: int) -> Recovered:
    """The best of some, as the attacker can tell."""
    return min((attempt() for _ in range(times)), key=lambda found: (math.isnan(found.mismatch), found.mismatch))


def _noise(known: Known, generator: torch.Generator) -> Tensor:
    return torch.randn(1, *known.shape, generator=generator)


def _by_lbfgs(
    known: Known,
    sent: Sequence[Tensor],
    inputs: Tensor,
    targets: Callable[[], Tensor],
    beside: list[Tensor],
    iterations: int,
) -> float:
    """Move the inputs, and what targets are made of, in place; returns the mismatch."""
    moved = [each.requires_grad_() for each in (inputs, *beside)]
    # The paper takes no line search, and many a start diverges so.
    optimizer = torch.optim.LBFGS(
        moved, max_iter=iterations, history_size=100, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        loss = _squares(known.sent_for(inputs, targets()), sent)
        for each, gradient in zip(moved, torch.autograd.grad(loss, moved), strict=True):
            each.grad = gradient
        return loss.detach()

    optimizer.step(closure)
    return float(_squares(known.sent_for(inputs, targets()), sent).detach())


def _squares(found: Sequence[Tensor], sent: Sequence[Tensor]) -> Tensor:
    return torch.stack([(mine - theirs).square().sum() for mine, theirs in zip(found, sent, strict=True)]).sum()


def _distance(found: Sequence[Tensor], sent: Sequence[Tensor]) -> float:
    return float(_squares(found, sent).detach())


def _angle(found: Sequence[Tensor], sent: Sequence[Tensor]) -> Tensor:
    """1 minus the cosine."""
    inner = torch.stack([(mine * theirs).sum() for mine, theirs in zip(found, sent, strict=True)]).sum()
    norms = [torch.stack([each.square().sum() for each in side]).sum().sqrt() for side in (found, sent)]
    return 1 - inner / (norms[0] * norms[1]).clamp(min=1e-12)


def _total_variation(images: Tensor) -> Tensor:
    down, right = images.diff(dim=-2).abs().mean(), images.diff(dim=-1).abs().mean()
    return down + right
