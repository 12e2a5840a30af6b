"""The largest coefficients of a cosine transform."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.codec.base import Payload, Shape, TensorCodec, doc, from_blocks, in_blocks
from paceline.errors import UsageError


@final
@dataclass(frozen=True, kw_only=True)
class DCT(TensorCodec, name="dct"):
    """Tiles of the flat vector are transformed, and the largest coefficients of each are sent; what is left out is
    momentum for the next gradients.

    Peng, Quesnelle and Kingma, "DeMo: decoupled momentum optimization", 2024, algorithm 1. There tiles are cut from
    each matrix in two dimensions, here from the flat vector, so that any range of it is coded alike; and the update's
    sign is the optimizer's business.
    """

    sparse: ClassVar[bool] = True
    contracts: ClassVar[bool] = True
    feedback: ClassVar[bool] = True
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (4.71, 2.42)

    edge: int = doc(64, "a tile has the square of so many elements")
    keep: int = doc(32, "coefficients that are sent of each tile")
    decay: float = doc(0.999, "of the momentum, each step")

    def __post_init__(self) -> None:
        if not 2 <= self.edge <= 180:  # places are 16-bit numbers
            raise UsageError(f"edge must be between 2 and 180, not {self.edge}")
        if not 1 <= self.keep <= self.edge**2:
            raise UsageError(f"keep must be between 1 and {self.edge**2}, the elements of a tile, not {self.keep}")
        if not 0 < self.decay <= 1:
            raise UsageError(f"decay must be above 0 and at most 1, not {self.decay}")

    @property
    def block(self) -> int:
        return self.edge**2

    @property
    def part(self) -> float:
        return self.keep / self.edge**2

    def num_bytes(self, shape: Shape) -> int:
        return 6 * self.keep * -(-math.prod(shape) // self.edge**2)

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        basis = _basis(self.edge, tensor.device)
        tiles = in_blocks(tensor, self.edge**2).view(-1, self.edge, self.edge)
        coefficients = (basis @ tiles @ basis.T).view(-1, self.edge**2)
        places = coefficients.abs().topk(self.keep, dim=1, sorted=False).indices
        return coefficients.gather(1, places), places.to(torch.int16)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        values, places = payload
        basis = _basis(self.edge, like.device)
        coefficients = values.new_zeros(len(values), self.edge**2).scatter_(1, places.long(), values)
        return from_blocks(basis.T @ coefficients.view(-1, self.edge, self.edge) @ basis, like)


@functools.lru_cache
def _basis(size: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II, shape (size, size), a frequency a row."""
    frequency, place = torch.arange(size)[:, None].double(), torch.arange(size)[None].double()
    basis = torch.cos(math.pi / size * (place + 0.5) * frequency) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis.float().to(device)
