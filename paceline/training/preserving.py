"""A model that is used as never before, and of which nothing is to be seen afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.seeding import preserved_random_state


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Have its modules' modes, its buffers, also those that are assigned anew inside, and random numbers be at the end
    as they were. Modes are set as flags: a script's own modules may do more in `train` and `eval`."""
    modes = {module: module.training for module in model.modules()}
    buffers = {module: _copied(module) for module in model.modules()}
    try:
        with preserved_random_state():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, own in buffers.items():
            _put_back(module, own)


def _copied(module: nn.Module) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Its buffers by name, each beside a copy."""
    return {name: (each, None if each is None else each.clone()) for name, each in module._buffers.items()}


@torch.no_grad()
def _put_back(module: nn.Module, own: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
    now = dict(module._buffers.items())
    for name in now.keys() - own.keys():
        del module._buffers[name]
    for name, (buffer, value) in own.items():
        if name not in now or now[name] is not buffer:
            module._buffers[name] = buffer
        if buffer is not None and value is not None:
            buffer.copy_(value)
