"""How rows are read: by the server that has them, and by workers on its host that see its memory."""

from typing import Any

import torch
from torch import Tensor

from paceline.arrays import as_words
from paceline.server.tables.hashing import normal
from paceline.server.tables.spec import TableSpec


def rows_of(spec: TableSpec, rows: Tensor, keys: Tensor, slots: Any, *, seed: int, are_made: bool = False) -> Tensor:
    """A copy of the rows in these slots.

    Args:
        slots: of each key, a NumPy array; below 0 where it has none.
        are_made: all have one.
    """
    # Slots that are read while they change may be any number; then the rows do not count.
    found = torch.from_numpy(as_words(rows).take(slots, axis=0, mode="clip")).view(spec.dtype)
    if not are_made and len(slots) and slots.min() < 0:
        is_new = torch.from_numpy(slots < 0)
        found[is_new] = first_values(spec, keys[is_new], seed=seed)
    return found


def first_values(spec: TableSpec, keys: Tensor, *, seed: int) -> Tensor:
    """What rows are that were never updated."""
    if not spec.std:
        return torch.zeros(len(keys), spec.dim, dtype=spec.dtype)
    return (normal(keys, seed=seed, num=spec.dim) * spec.std).to(spec.dtype)
