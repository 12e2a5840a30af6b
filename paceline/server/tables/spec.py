"""What a table is, and which keys and gradients it takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.arrays import is_finite
from paceline.errors import UsageError
from paceline.server.tables.row_optimizers import RowOptimizer, of_text

_MOST_ROWS = 2**63
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = "rows"
"""The column of a table's rows, beside those of their optimizer's state."""
_DTYPES = {"float32": torch.float32, "float64": torch.float64, **_HALF}
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


class Width(NamedTuple):
    """What one column holds of a key."""

    num: int
    dtype: torch.dtype


class RowGradients(NamedTuple):
    """Gradients of some rows of a table, in the precision that it computes in."""

    keys: Tensor
    """int64 of shape (rows,), none twice."""
    values: Tensor
    """Shape (rows, dim)."""


@final
@dataclass(frozen=True)
class TableSpec:
    """A table of `num_rows` rows of `dim` elements, each of which begins with draws from a normal distribution.

    Raises:
        UsageError: a number is out of range; the message names it and the table.
    """

    name: str
    num_rows: int
    dim: int
    optimizer: RowOptimizer
    std: float = 1.0
    """The standard deviation of the distribution that first values are drawn from; its mean is 0."""
    seed: int = 0
    dtype: torch.dtype = torch.float32
    min_count: int = 1
    """A key's row is made by the update that is the so manieth with a gradient of it; those before are dropped."""
    evict_after: int | None = None
    """A row goes that has had no gradient for so many updates; none: it stays."""
    max_rows: int | None = None
    """Where there are more, those that have had none for longest go; none: there may be any number."""

    def __post_init__(self) -> None:
        if type(self.name) is not str or not self.name:
            raise UsageError(f"a table's name must be some text, not {self.name!r}")
        if not isinstance(self.optimizer, RowOptimizer):
            raise UsageError(
                f"table {self.name!r}: its optimizer must be one of paceline.nn, such as Adagrad(lr=0.1), or its text, "
                f"not {self.optimizer!r}"
            )
        numbers = {name: getattr(self, name) for name in ("num_rows", "min_count", "evict_after", "max_rows", "dim")}
        for what, value in numbers.items():
            most = 2**20 if what == "dim" else _MOST_ROWS
            is_left_out = value is None and what in ("evict_after", "max_rows")
            if not is_left_out and (type(value) is not int or not 1 <= value <= most):
                raise UsageError(f"table {self.name!r}: {what} must be a whole number from 1 to {most}, not {value!r}")
        if not 0 <= self.std < float("inf"):
            raise UsageError(f"table {self.name!r}: std must be a number of at least 0, not {self.std!r}")
        if self.dtype not in _DTYPES.values():
            kinds = "float32, float64, bfloat16 or float16"
            raise UsageError(f"table {self.name!r}: rows are {kinds}, not {self.dtype}")

    def plain(self) -> dict[str, Any]:
        """As plain data, for `of_plain`."""
        kind = next(name for name, dtype in _DTYPES.items() if dtype is self.dtype)
        return {**vars(self), "optimizer": str(self.optimizer), "dtype": kind}

    @classmethod
    def of_plain(cls, given: Mapping[str, Any]) -> "TableSpec":
        """Raises UsageError if this is nothing that `plain` gives."""
        try:
            optimizer, dtype = of_text(given["optimizer"]), _DTYPES[given["dtype"]]
            return cls(**{**given, "optimizer": optimizer, "dtype": dtype})
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"no description of a table: {error}") from None

    @property
    def evicts(self) -> bool:
        """Whether rows go again."""
        return self.evict_after is not None or self.max_rows is not None

    @property
    def is_half(self) -> bool:
        """Whether rows lie and move in 16 bits an element."""
        return self.dtype.itemsize == 2

    @property
    def computed(self) -> torch.dtype:
        """The dtype of what the script gets and gives, of the optimizer's state, and of updates."""
        return torch.float32 if self.is_half else self.dtype

    @property
    def sent(self) -> torch.dtype:
        """The dtype of gradients on their way, which may be beyond float16's range."""
        return torch.bfloat16 if self.is_half else self.dtype

    @property
    def columns(self) -> dict[str, Width]:
        """What is kept of each row: itself, and its optimizer's state."""
        states = {
            name: Width(self.dim if width == "element" else 1, self.computed)
            for name, (width, _) in self.optimizer.state.items()
        }
        return {ROWS: Width(self.dim, self.dtype), **states}

    def empty_rows(self, num: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for so many rows, shape (num, dim), of the table's own type if not another one is named."""
        return torch.empty(num, self.dim, dtype=dtype or self.dtype)

    def checked(self, keys: Tensor) -> Tensor:
        """The keys as int64. Raises UsageError, which names the table and a key that it has no row for."""
        if keys.dtype not in _WHOLE:
            raise UsageError(f"table {self.name!r}: keys are whole numbers, and these are {keys.dtype}: {_some(keys)}")
        is_unsigned, keys = keys.dtype is torch.uint64, keys.long()
        # One pass: what is below 0 is at least 2**63 without its sign.
        if keys.numel() and keys.cpu().numpy().view("u8").max() >= self.num_rows:
            key = int(keys[(keys < 0) | (keys > self.num_rows - 1)][0])
            key = key % 2**64 if is_unsigned else key  # as the script has it
            raise UsageError(f"table {self.name!r} has rows 0 to {self.num_rows - 1}, and none of key {key}")
        return keys

    def nonfinite(self, gradients: RowGradients) -> int | None:
        """A key whose gradient is NaN or infinite."""
        if is_finite(gradients.values):
            return None
        return int(gradients.keys[~gradients.values.isfinite().all(dim=1)][0])


def summed(some: list[RowGradients], weights: list[float] | None = None) -> RowGradients:
    """Gradients of one table, at least one, as one: their sum, or their mean with these weights."""
    if len(some) == 1:
        return some[0]
    weighed = [each.values for each in some]
    if weights is not None:
        total = sum(weights)
        weighed = [values * (weight / total) for values, weight in zip(weighed, weights, strict=True)]
    keys, places = torch.cat([each.keys for each in some]).unique(return_inverse=True)
    values = torch.zeros(len(keys), weighed[0].shape[1], dtype=weighed[0].dtype)
    return RowGradients(keys, values.index_add_(0, places, torch.cat(weighed)))


def are_different(keys: Tensor) -> bool:
    """Whether none of these int64, in this process's memory, comes twice."""
    own, mask = keys.numpy(), (4 << len(keys).bit_length()) - 1
    # Of those whose low bits are the same one keeps the place. So equal ones are the one that keeps it and one that
    # does not, or two that do not. Sorting all keys takes twice as long.
    places, last = own & mask, torch.empty(mask + 1, dtype=torch.int32).numpy()
    numbers = torch.arange(len(own), dtype=torch.int32).numpy()
    last[places] = numbers
    kept = last.take(places)
    (others,) = (kept != numbers).nonzero()
    left = own.take(others)
    if (own.take(kept.take(others)) == left).any():
        return False
    left.sort()
    return not (left[1:] == left[:-1]).any()


def _some(keys: Tensor) -> str:
    flat = keys.reshape(-1)
    return f"{flat[:3].tolist()}{' and others' if len(flat) > 3 else ''}"
