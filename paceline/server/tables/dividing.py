"""A table's state, divided among servers and put together again: the same whatever their number."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.server.tables.entries import KEYS
from paceline.server.tables.hashing import owners

WAITING = "waiting_"
"""The beginning of the names of what is known of keys that have no rows."""


def divided(state: Mapping[str, Tensor], num_servers: int) -> list[dict[str, Tensor]]:
    """Each server's part of what `Table.state` gives."""
    return [part_of(state, server=server, num_servers=num_servers) for server in range(num_servers)]


def part_of(state: Mapping[str, Tensor], *, server: int, num_servers: int) -> dict[str, Tensor]:
    is_own = {name: owners(state[name], num_servers) == server for name in _all_keys(state)}
    return {name: value[is_own[_keys_of(name)]] if value.dim() else value for name, value in state.items()}


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The inverse of `divided`."""
    order = {name: torch.cat([part[name] for part in parts]).argsort() for name in _all_keys(parts[0])}
    return {
        name: torch.cat([part[name] for part in parts])[order[_keys_of(name)]] if value.dim() else value
        for name, value in parts[0].items()
    }


def _all_keys(state: Mapping[str, Tensor]) -> set[str]:
    return {_keys_of(name) for name in state}


def _keys_of(name: str) -> str:
    """The name of the keys that these entries belong to."""
    return WAITING + KEYS if name.startswith(WAITING) else KEYS
