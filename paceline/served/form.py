"""What both ends of a served run have to agree on before a tensor travels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from paceline.layout import TensorSpec
from paceline.messages import FRAME_BYTES, as_bytes

VERSION = 1
"""The protocol's version; ends refuse each other if theirs differ."""
EPOCH = 0
"""The epoch that all messages name: who takes part is said by tickets, not by a membership."""
TRAINS = 1
"""A flag of PULSE: the client is at its turn of the round."""
MOST_SAMPLES = 2**40
"""A client that says that it has more is not believed."""


class Refused(ValueError):
    """What a client sent is not taken; the message says why."""


@final
@dataclass(frozen=True)
class Form:
    """Tensors that travel as one run of bytes, in pieces."""

    specs: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def num_pieces(self) -> int:
        return pieces_of(self.num_bytes)

    def described(self) -> list[list[Any]]:
        """As plain data."""
        return [[spec.name, str(spec.dtype), list(spec.shape)] for spec in self.specs]

    def require(self, theirs: Any) -> None:
        """Raises Refused, which names the first tensor that differs, unless `theirs` describes the same tensors."""
        own = self.described()
        if not isinstance(theirs, list) or len(theirs) != len(own):
            count = len(theirs) if isinstance(theirs, list) else "no"
            raise Refused(f"its script exchanges {count} tensors, the server's {len(own)}")
        for mine, its in zip(own, theirs, strict=True):
            if mine != its:
                raise Refused(f"its script has {_said(its)} where the server's has {_said(mine)}")

    def write(self, tensors: Sequence[Tensor]) -> memoryview:
        """A copy of the tensors, one after the other."""
        flat = torch.empty(self.num_bytes, dtype=torch.uint8)
        start = 0
        for tensor in tensors:
            raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            flat[start : start + raw.numel()] = raw
            start += raw.numel()
        return as_bytes(flat)

    def read(self, raw: bytearray | bytes | memoryview) -> list[Tensor]:
        """The inverse of `write`: tensors of their own."""
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8)
        found, start = [], 0
        for spec in self.specs:
            stop = start + spec.num_bytes
            found.append(flat[start:stop].clone().view(spec.dtype).view(spec.shape))
            start = stop
        return found


def pieces_of(num_bytes: int) -> int:
    """How many pieces so many bytes travel in; nothing is a piece, too."""
    return max(1, math.ceil(num_bytes / FRAME_BYTES))


def piece(content: memoryview, index: int) -> memoryview:
    """The piece of this number, not copied."""
    return content[index * FRAME_BYTES : (index + 1) * FRAME_BYTES]


def _said(described: Any) -> str:
    try:
        name, dtype, shape = described
        return f"{str(name)[:80]!r} of {str(dtype).removeprefix('torch.')[:20]} and shape {str(shape)[:80]}"
    except (TypeError, ValueError):
        return "no tensor"
