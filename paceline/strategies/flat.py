"""A model's parameters in flat memory, so that they move as few large tensors."""

import torch
from torch import Tensor

from paceline.layout import Layout, by_group
from paceline.strategies.replica import Replica


def lay_parameters(replica: Replica, layout: Layout, buffer: Tensor) -> list[Tensor]:
    """Have every parameter be a view of `buffer`, a uint8 tensor of `layout.num_bytes`; returns the views."""
    views = layout.views(buffer)
    for parameter, view in zip(replica.parameters, views, strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return views


def flattened(replica: Replica) -> list[Tensor]:
    """Lay the parameters in flat memory; returns one 1-D tensor for each dtype and parameter group."""
    layout = by_group(replica.specs)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=replica.parameters[0].device)
    lay_parameters(replica, layout, buffer)
    return [segment.view(buffer) for segment in layout.segments]
