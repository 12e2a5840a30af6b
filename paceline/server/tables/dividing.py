"""A table's state, divided among servers and put together again: the same whatever their number."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.server.tables.hashing import owners

_KEYS = "keys"


def divided(state: Mapping[str, Tensor], num_servers: int) -> list[dict[str, Tensor]]:
    """Of what `Table.state` gives, each server's part."""
    owner = owners(state[_KEYS], num_servers)
    return [
        {name: value[owner == server] if value.dim() else value for name, value in state.items()}
        for server in range(num_servers)
    ]


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The inverse of `divided`."""
    order = torch.cat([part[_KEYS] for part in parts]).argsort()
    return {
        name: torch.cat([part[name] for part in parts])[order] if value.dim() else value
        for name, value in parts[0].items()
    }
