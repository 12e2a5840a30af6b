"""Real numbers as words whose sum modulo 2^32 does not wrap."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from paceline.secure.secrets import Words


@final
@dataclass(frozen=True)
class Quantiser:
    """Values within -clip and clip on as many even levels as `num_clients` summed vectors leave room for.

    Others become the nearer bound; one that is not a number is refused."""

    clip: float
    num_clients: int

    def __post_init__(self) -> None:
        if not self.clip > 0 or self.num_clients < 1:
            raise ValueError("clip must be above 0, and there must be a client")

    @property
    def step(self) -> float:
        """The distance from one level to the next; a value is off by half of it at most."""
        return 2 * self.clip / self._num_steps

    @property
    def _num_steps(self) -> int:
        return (2**32 - 1) // self.num_clients

    def encode(self, vector: Tensor) -> Words:
        """Raises ValueError if an element is NaN."""
        if bool(vector.isnan().any()):
            raise ValueError("a vector for secure aggregation holds NaN")
        levels = ((vector.double().clamp(-self.clip, self.clip) + self.clip) / self.step).round()
        words: Words = levels.to(torch.int64).cpu().numpy().astype(np.uint32)
        return words

    def decode(self, total: Words, *, num_summed: int) -> Tensor:
        """The sum of so many vectors, float64."""
        return torch.from_numpy(total.astype(np.float64)) * self.step - num_summed * self.clip
