"""What an optimizer is asked to do, in a form that workers can compare."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.base import Collective
from paceline.errors import TensorMismatch
from paceline.server.optimizer import IMPLEMENTATION
from paceline.strategies.replica import hyperparameters

Settings = tuple[str, list[dict[str, float | str]]]
"""The optimizer's class, and each parameter group's settings: numbers, and all else as text."""

_CLOSE = 1e-6  # schedulers use sines and powers, which processors of different kinds round differently


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    groups = [
        {name: _plain(value) for name, value in group.items() if name not in IMPLEMENTATION}
        for group in hyperparameters(optimizer)
    ]
    return type(optimizer).__name__, groups


def first_difference(everyone: Sequence[Settings]) -> str | None:
    """In words, how the first rank that differs from rank 0 does so."""
    kind, groups = everyone[0]
    for rank, (other_kind, others) in enumerate(everyone):
        if kind != other_kind:
            return f"the optimizer is {kind} on rank 0 and {other_kind} on rank {rank}"
        if len(groups) != len(others):
            return f"the optimizer has {len(groups)} parameter groups on rank 0 and {len(others)} on rank {rank}"
        for number, (mine, theirs) in enumerate(zip(groups, others, strict=True)):
            for name in sorted(mine.keys() | theirs.keys()):
                values = mine.get(name, "not there"), theirs.get(name, "not there")
                if not _are_alike(*values):
                    return f"param group {number}: {name} is {values[0]} on rank 0 and {values[1]} on rank {rank}"
    return None


def require_same_settings(optimizer: torch.optim.Optimizer, collective: Collective) -> None:
    """Raises TensorMismatch on every rank, naming the first rank whose optimizer is not rank 0's. Collective call."""
    difference = first_difference(collective.all_gather_object(settings_of(optimizer)))
    if difference is not None:
        raise TensorMismatch(f"{difference}; give every rank the same optimizer with the same settings")


def _plain(value: Any) -> float | str:
    if type(value) in (int, float):
        number: float = value
        return number
    is_plain = isinstance(value, str | bool | None) or (
        isinstance(value, tuple | list) and all(isinstance(each, int | float | str | None) for each in value)
    )
    # The text of anything else may say where it lies in memory.
    return str(value) if is_plain else type(value).__qualname__


def _are_alike(one: float | str, other: float | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return math.isclose(one, other, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))
