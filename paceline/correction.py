"""What is changed in a worker's local step: a term that is added to its gradients."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from paceline.pieces import Piece


class Control(NamedTuple):
    """What a correction with a state knows of one parameter, both of its shape, and 0 at first."""

    own: Tensor
    """The client's, kept from turn to turn."""
    shared: Tensor
    """The mean of all clients' ones, as the server knows it."""


class Correction(Piece, ABC):
    """Pure: the term follows from the parameters, from what they were when the round began, and from the controls."""

    keeps_state: ClassVar[bool] = False
    """Whether clients have controls."""

    @abstractmethod
    def term(self, parameter: Tensor, anchor: Tensor, control: Control | None = None) -> Tensor:
        """What to add to the parameter's gradient.

        Args:
            anchor: the parameter at the beginning of the round.
        """

    def kept(self, control: Control, direction: Tensor) -> Tensor:
        """The client's own control after its turn.

        Args:
            direction: the mean of what its steps followed: what they took off the parameter, over the sum of their
                learning rates.
        """
        return control.own


@final
@dataclass(frozen=True)
class Proximal(Correction, name="proximal"):
    """Draws a worker back to where its round began (FedProx: Li et al., MLSys 2020, section 3.2)."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ValueError(f"mu must be at least 0 and finite, not {self.mu:g}")

    def term(self, parameter: Tensor, anchor: Tensor, control: Control | None = None) -> Tensor:
        return self.mu * (parameter - anchor)


@final
@dataclass(frozen=True)
class ControlVariates(Correction, name="control-variates"):
    """Puts the mean client's direction in the place of the client's own (SCAFFOLD: Karimireddy et al., ICML 2020,
    algorithm 1, with option II for what a client keeps). Exact for plain SGD."""

    keeps_state: ClassVar[bool] = True

    def term(self, parameter: Tensor, anchor: Tensor, control: Control | None = None) -> Tensor:
        assert control is not None
        return control.shared - control.own

    def kept(self, control: Control, direction: Tensor) -> Tensor:
        return control.own - control.shared + direction


@torch.no_grad()
def correct(
    correction: Correction,
    parameters: Sequence[Tensor],
    anchors: Sequence[Tensor],
    controls: Sequence[Control] | None = None,
) -> None:
    """Add the term to the gradient of every parameter that has one, before the optimizer's step."""
    known = controls if controls is not None else [None] * len(parameters)
    for parameter, anchor, control in zip(parameters, anchors, known, strict=True):
        if parameter.grad is not None:
            parameter.grad += correction.term(parameter.detach(), anchor, control)
