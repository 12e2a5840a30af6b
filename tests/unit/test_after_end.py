"""Passes over a prepared loader once the run has ended."""

from __future__ import annotations

import inspect
import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.training.sharding import ShardedLoader


def test_the_warning_of_empty_passes_names_the_line_of_the_script_that_makes_them() -> None:
    is_over = False
    loader = ShardedLoader(
        DataLoader(TensorDataset(torch.arange(4)), batch_size=2), rank=0, size=1, seed=0, should_stop=lambda: is_over
    )

    def evaluate() -> int:
        with torch.no_grad():
            return sum(1 for _ in loader)

    assert len(list(loader)) == evaluate() == 2
    is_over = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):  # as a script goes through its remaining epochs
            assert not list(loader)
            evaluate()
    (warning,) = told
    lines, first = inspect.getsourcelines(evaluate)
    assert warning.filename == __file__
    assert first <= warning.lineno < first + len(lines)
