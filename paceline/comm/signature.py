"""What a rank says about its part in a collective operation, so that ranks that disagree find out."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from paceline.comm.base import REDUCE_OPS, ReduceOp

MAX_DIMENSIONS = 8
FORM_NUMBERS = 2 + MAX_DIMENSIONS
"""int64 numbers in a packed form: dtype, number of dimensions, shape."""
_OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "message",
    "gather",
    "scatter",
)
_ROOTED = {"broadcast": " from rank {}", "gather": " to rank {}"}
# In an order that does not depend on the process.
_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)
_FORMAT = struct.Struct("<BBBxIQQ")
SIGNATURE_BYTES = _FORMAT.size


@final
@dataclass(frozen=True)
class Signature:
    """An operation as all ranks must agree on it."""

    operation: str
    dtype: torch.dtype = torch.uint8
    num_elements: int = 0
    op: ReduceOp | None = None
    root: int = 0
    offset_bytes: int | None = None
    """Where the tensor starts, counted through all allocated memory; None for one that lies elsewhere."""
    raw: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        packed = _FORMAT.pack(
            _OPERATIONS.index(self.operation),
            _DTYPES.index(self.dtype),
            1 + REDUCE_OPS.index(self.op) if self.op else 0,
            self.root,
            self.num_elements,
            0 if self.offset_bytes is None else 1 + self.offset_bytes,
        )
        object.__setattr__(self, "raw", packed)

    @classmethod
    def unpack(cls, raw: bytes) -> "Signature":
        operation, dtype, op, root, num_elements, place = _FORMAT.unpack(raw)
        return cls(
            _OPERATIONS[operation],
            _DTYPES[dtype],
            num_elements,
            REDUCE_OPS[op - 1] if op else None,
            root,
            place - 1 if place else None,
        )

    def __str__(self) -> str:
        if self.operation == "barrier":
            return self.operation
        if self.operation == "scatter":
            return f"scatter from rank {self.root}"  # what it is of, only the root knows
        what = f"{self.operation}({self.op})" if self.op else self.operation
        size = f"{self.num_elements} elements of " if self.num_elements else ""
        root = _ROOTED.get(self.operation, "").format(self.root)
        place = "" if self.offset_bytes is None else f" at byte {self.offset_bytes} of allocated memory"
        return f"{what} of {size}{str(self.dtype).removeprefix('torch.')}{root}{place}"


@final
@dataclass(frozen=True)
class TensorForm:
    """Dtype and shape of a tensor that a peer sends."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, raw: Tensor) -> Tensor:
        """The bytes, 1-D and aligned for the dtype, as a tensor of this form."""
        return raw.view(self.dtype).view(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def pack_forms(tensors: Sequence[Tensor]) -> Tensor:
    """Dtypes and shapes, int64 (tensors, FORM_NUMBERS). Raises ValueError beyond MAX_DIMENSIONS dimensions."""
    for tensor in tensors:
        if tensor.dim() > MAX_DIMENSIONS:
            raise ValueError(
                f"a tensor of {tensor.dim()} dimensions cannot be sent: at most {MAX_DIMENSIONS}; reshape it"
            )
    return torch.tensor(
        [
            [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (MAX_DIMENSIONS - tensor.dim())]
            for tensor in tensors
        ]
    )


def unpack_forms(rows: Tensor) -> list[TensorForm]:
    return [
        TensorForm(_DTYPES[dtype], tuple(shape[:num_dimensions])) for dtype, num_dimensions, *shape in rows.tolist()
    ]
