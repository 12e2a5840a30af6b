"""A model's parameters in flat memory, so that they move as few large tensors."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.layout import Layout, by_group
from paceline.strategies.replica import Replica
from paceline.strategies.taken_along import TakenAlong, extent


def lay_parameters(replica: Replica, layout: Layout, buffer: Tensor) -> list[Tensor]:
    """Have every parameter be a view of `buffer`, a uint8 tensor of `layout.num_bytes`; returns the views. Those that
    move by rows stay where they are.

    Raises:
        UsageError: a parameter shares its memory with another tensor of the model, and so would lose it; or with one
            of the script's that cannot follow.
    """
    _refuse_shared_memory(replica)
    moved = [index for index in range(len(replica.parameters)) if index not in replica.by_rows]
    taken = TakenAlong([replica.parameters[index] for index in moved], [replica.specs[index] for index in moved])
    views = layout.views(buffer)
    for index in moved:
        views[index].copy_(replica.parameters[index].data)
        replica.parameters[index].data = views[index]
    taken.follow()
    return views


def flattened(replica: Replica) -> list[Tensor]:
    """Lay the parameters in flat memory; returns one 1-D tensor for each dtype and parameter group."""
    layout = by_group(replica.specs)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=replica.parameters[0].device)
    lay_parameters(replica, layout, buffer)
    return [segment.view(buffer) for segment in layout.segments]


def _refuse_shared_memory(replica: Replica) -> None:
    """Raises UsageError where a parameter that is to move lies in the memory of another tensor of the model."""
    moved = set(map(id, replica.parameters))
    places = sorted((extent(tensor), id(tensor) in moved, name) for name, tensor in _tensors_of(replica.model))
    for ((_, stop), is_moved, name), ((start, _), other_is_moved, other) in pairwise(places):
        if start < stop and (is_moved or other_is_moved):
            raise UsageError(
                f"{name!r} and {other!r} share memory, which they would not where servers or neighbours read "
                "parameters from memory of their own; tie layers by assigning one Parameter to both, derive the other "
                "tensor in forward(), or use all-reduce"
            )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, buffer and other tensor that a module has as an attribute, once.

    Not what old-style spectral norm and pruning compute from `<name>_orig` before every forward pass.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if f"{name}_orig" not in module._parameters}
        own = {**module._parameters, **module._buffers, **plain}
        for name, tensor in own.items():
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}".lstrip("."), tensor
