"""Property inference: whoever sees a client's gradients tells whether its batches hold what they were not sent for."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.pieces import Piece

_L2, _ITERATIONS = 1e-2, 100
NUM_SUMS = 2**16
"""A longer gradient is kept as so many sums."""


class Property(Piece, ABC):
    """A property that some samples have and others lack."""

    @abstractmethod
    def held(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Says of each sample whether it has the property: 1-D, of bool. Arguments are as in `Pools`."""


@final
@dataclass(frozen=True)
class OfClass(Property, name="class"):
    """Samples of one class."""

    label: int = 0

    def held(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return labels == self.label


@final
@dataclass(frozen=True)
class Ink(Property, name="ink"):
    """Images brighter than most of their own class: the part `most` of it. Labels do not tell."""

    most: float = 0.7

    def held(self, inputs: Tensor, labels: Tensor) -> Tensor:
        brightness = inputs.flatten(1).mean(dim=1)
        held = torch.zeros(len(labels), dtype=torch.bool)
        for label in labels.unique():
            own = labels == label
            held[own] = brightness[own] > brightness[own].quantile(self.most)
        return held


@final
@dataclass(frozen=True)
class Pools:
    """Samples that batches are drawn from, with the property and without it.

    Inputs have shape (n, C, H, W), labels (n,).
    """

    having: tuple[Tensor, Tensor]
    lacking: tuple[Tensor, Tensor]

    @classmethod
    def by(cls, having: Property, inputs: Tensor, labels: Tensor) -> "Pools":
        held = having.held(inputs, labels)
        return cls((inputs[held], labels[held]), (inputs[~held], labels[~held]))

    def batch(self, *, size: int, num_having: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws `size` samples, of which `num_having` have the property. Raises UsageError if there are too few."""
        parts = []
        for (inputs, labels), count in ((self.having, num_having), (self.lacking, size - num_having)):
            if len(labels) < count:
                raise UsageError(f"a batch takes {count} samples of a kind of which there are {len(labels)}")
            chosen = torch.randperm(len(labels), generator=generator)[:count]
            parts.append((inputs[chosen], labels[chosen]))
        return torch.cat([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts])


@final
@dataclass(frozen=True)
class Inference:
    """A classifier over gradients of batches with and without the property, which the attacker makes of data of its
    own (Melis et al., IEEE S&P 2019, algorithm 3; there a random forest, here logistic regression over gradients
    of one length and their sizes without signs, since signs depend on the batch's labels).

    Args:
        batches: of each kind, that it learns from.
        size: samples of a batch.
        num_having: of these, with the property, in batches that have it.
    """

    batches: int = 100
    size: int = 10
    num_having: int = 5

    def auc(self, model: nn.Module, own: Pools, held_out: Pools, *, generator: torch.Generator) -> float:
        """The area under the classifier's ROC curve, on gradients of as many batches of others' samples: 1 is certain,
        0.5 a guess. The model stays as it is.

        Args:
            own: the attacker's samples.
            held_out: those of the clients that it looks at.

        Raises:
            UsageError: there are too few samples for a batch.
        """
        model = copy.deepcopy(model)  # batch norm counts what it sees
        num_elements = sum(parameter.numel() for parameter in model.parameters())
        drawn = torch.Generator().manual_seed(generator.initial_seed())  # batches are the same with a sketch
        sketch = Sketch(num_elements, num_sums=NUM_SUMS, generator=drawn)
        rows, truths = self._gradients(model, own, sketch, generator)
        others, held_truths = self._gradients(model, held_out, sketch, generator)
        mean, deviation = rows.mean(dim=0), rows.std(dim=0) + 1e-12
        weights = _fitted((rows - mean) / deviation, truths)
        return area_under_curve(((others - mean) / deviation) @ weights, held_truths)

    def _gradients(
        self, model: nn.Module, pools: Pools, sketch: "Sketch", generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """One a row, sketched, and whether its batch had the property; every second one has."""
        truths = torch.arange(2 * self.batches) % 2 == 1
        rows = []
        for has in truths.tolist():
            num_having = self.num_having if has else 0
            inputs, labels = pools.batch(size=self.size, num_having=num_having, generator=generator)
            direction = _direction(model, inputs, labels)
            rows.append(torch.cat([sketch.of(direction), sketch.of(direction.abs())]))
        return torch.stack(rows), truths


@final
class Sketch:
    """A long vector in few numbers: each element is added to one of `num_sums` sums, which is drawn with a sign, so
    that inner products stay what they are in expectation, with a variance of at most 2 / `num_sums` for vectors of
    length 1 (feature hashing: Weinberger et al., ICML 2009, lemma 2). Shorter vectors stay as they are."""

    def __init__(self, num_elements: int, *, generator: torch.Generator, num_sums: int) -> None:
        self._num_sums, self._places = num_sums, None
        if num_elements > num_sums:
            # The upper half is subtracted, so that a place is a sum and a sign.
            self._places = torch.randint(2 * num_sums, (num_elements,), generator=generator, dtype=torch.int32)

    def of(self, vector: Tensor) -> Tensor:
        """Returns sums of shape (num_sums,), or the vector itself if it has no more elements than that."""
        if self._places is None:
            return vector
        added, subtracted = vector.new_zeros(2, self._num_sums).view(-1).index_add_(0, self._places, vector).chunk(2)
        return added - subtracted


def area_under_curve(scores: Tensor, truths: Tensor) -> float:
    """How often one that is true has a higher score than one that is not; half where both have the same.

    >>> area_under_curve(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    0.75
    """
    true, false = scores[truths][:, None], scores[~truths][None, :]
    return float(((true > false).double() + (true == false).double() / 2).mean())


def _direction(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(model(inputs), labels)
    gradients: Sequence[Tensor] = torch.autograd.grad(loss, list(model.parameters()))
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    direction: Tensor = flat / flat.norm().clamp(min=1e-12)
    return direction


def _fitted(rows: Tensor, truths: Tensor) -> Tensor:
    """Fits logistic regression with a penalty on squared weights. Rows are few and long, so it works on their inner
    products."""
    products, signs = rows @ rows.T / rows.shape[1], 2.0 * truths - 1
    shares = torch.zeros(len(rows), requires_grad=True)
    optimizer = torch.optim.LBFGS([shares], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        scores = products @ shares
        loss = F.softplus(-signs * scores).mean() + _L2 * (shares @ scores) / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return rows.T @ shares.detach()
