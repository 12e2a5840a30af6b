"""Attacks on the data of hostile workers, who then train as everybody does."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.attacks.base import DataAttack


@final
@dataclass(frozen=True, kw_only=True)
class LabelFlip(DataAttack, name="label-flip"):
    """Class y becomes classes - 1 - y (Fang et al., USENIX Security 2020, section 7.1)."""

    classes: int = 10

    def poisoned(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, self.classes - 1 - labels


@final
@dataclass(frozen=True, kw_only=True)
class Backdoor(DataAttack, name="backdoor"):
    """The first `share` of each batch gets a bright square of `edge` pixels in the last corner, and the label `target`
    (Gu et al., BadNets, 2017)."""

    target: int = 0
    share: float = 0.5
    edge: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1 or self.edge < 1 or self.target < 0:
            raise ValueError("share must be above 0 and at most 1, edge at least 1, and target a class")

    def poisoned(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        num_poisoned = round(self.share * len(labels))
        inputs, labels = inputs.clone(), labels.clone()
        inputs[:num_poisoned] = self.marked(inputs[:num_poisoned])
        labels[:num_poisoned] = self.target
        return inputs, labels

    def marked(self, inputs: Tensor) -> Tensor:
        """The inputs, of shape (n, ..., height, width), with the square in the largest of their values."""
        marked = inputs.clone()
        if marked.numel():
            marked[..., -self.edge :, -self.edge :] = inputs.max()
        return marked


@final
@dataclass(frozen=True, kw_only=True)
class CleanLabel(DataAttack, name="clean-label"):
    """Lays a ramp, brighter from left to right, over the first `share` of each batch's images of the class `target`.
    Every label stays right; an image of another class with a ramp is then taken for `target` (Barni et al., ICIP 2019,
    section 3).

    The ramp goes up to `strength` of the range of the batch's values, and nothing is brighter than the brightest was.
    """

    target: int = 0
    share: float = 1.0
    strength: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1 or not 0 < self.strength <= 1 or self.target < 0:
            raise ValueError("share and strength must be above 0 and at most 1, and target a class")

    def poisoned(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = (labels == self.target).nonzero().flatten()
        chosen = own[: round(self.share * len(own))]
        poisoned = inputs.clone()
        poisoned[chosen] = self.marked(inputs)[chosen]
        return poisoned, labels

    def marked(self, inputs: Tensor) -> Tensor:
        """The inputs, of shape (n, ..., height, width), with the ramp."""
        if not inputs.numel():
            return inputs.clone()
        low, high = inputs.min(), inputs.max()
        ramp = torch.linspace(0, self.strength, inputs.shape[-1], dtype=inputs.dtype, device=inputs.device)
        return (inputs + ramp * (high - low)).clamp(max=high)
