"""How rows are updated: by the server that has them, and by workers on its host that it lends them to."""

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.arrays import as_words
from paceline.server.tables.rounding import rounded
from paceline.server.tables.row_optimizers import RowOptimizer
from paceline.server.tables.spec import ROWS, RowGradients, TableSpec


def copies(columns: Mapping[str, Tensor], slots: Tensor) -> dict[str, Tensor]:
    """Copies of the entries in these slots, by column."""
    places = slots.numpy()
    return {
        name: torch.from_numpy(as_words(column).take(places, axis=0)).view(column.dtype)
        for name, column in columns.items()
    }


def put(columns: Mapping[str, Tensor], slots: Tensor, entries: Mapping[str, Tensor]) -> None:
    """Have these entries in these slots, which are all different."""
    places = slots.numpy()
    for name, changed in entries.items():
        as_words(columns[name])[places] = as_words(changed)  # half of what index_copy_ takes


def step(
    spec: TableSpec,
    optimizer: RowOptimizer,
    entries: dict[str, Tensor],
    gradients: RowGradients,
    *,
    seed: int,
    number: int,
) -> None:
    """Have the optimizer update these entries, in place or by others.

    Args:
        gradients: of the same keys, in the same order.
        number: of the table's update.
    """
    rows = entries[ROWS].to(spec.computed)
    optimizer.step(rows, gradients.values, entries, number=number)
    if spec.is_half:
        entries[ROWS] = rounded(rows, spec.dtype, gradients.keys, seed=seed, number=number)
