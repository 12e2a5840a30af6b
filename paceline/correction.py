"""What is changed in a worker's local step: a term that is added to its gradients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


class Correction(ABC):
    """Pure: the term follows from the parameters and from what they were when the round began."""

    @abstractmethod
    def term(self, parameter: Tensor, anchor: Tensor) -> Tensor:
        """What to add to the parameter's gradient.

        Args:
            anchor: the parameter at the beginning of the round.
        """


@final
@dataclass(frozen=True)
class Proximal(Correction):
    """Draws a worker back to where its round began (FedProx: Li et al., MLSys 2020, section 3.2)."""

    mu: float

    def term(self, parameter: Tensor, anchor: Tensor) -> Tensor:
        return self.mu * (parameter - anchor)


@torch.no_grad()
def correct(correction: Correction, parameters: Sequence[Tensor], anchors: Sequence[Tensor]) -> None:
    """Add the term to the gradient of every parameter that has one, before the optimizer's step."""
    for parameter, anchor in zip(parameters, anchors, strict=True):
        if parameter.grad is not None:
            parameter.grad += correction.term(parameter.detach(), anchor)
