"""What clients change of buffers, and how the server takes it up."""

import torch
from torch import Tensor

from paceline.errors import UsageError


def real_dtype(buffer: Tensor) -> torch.dtype:
    """Whole numbers are averaged in double precision."""
    return buffer.dtype if buffer.is_floating_point() or buffer.is_complex() else torch.float64


def change_of(name: str, server: Tensor, local: Tensor) -> Tensor:
    """What a client took off the server's: 0 where both are the same, also where these are infinite or no numbers."""
    if server.shape != local.shape:
        raise UsageError(
            f"buffer {name!r} is of shape {list(local.shape)} now and was prepared with {list(server.shape)}, so that "
            "clients have no mean of it; keep its shape, or keep it in a plain attribute"
        )
    before, after = server.to(real_dtype(server)), local.detach().to(real_dtype(server))
    is_same = (server == local) | (before.isnan() & after.isnan())
    return torch.where(is_same, 0, before - after)


def moved(buffer: Tensor, change: Tensor) -> Tensor:
    """The buffer less what was changed. What nobody changed stays as it is, to the last bit."""
    less = buffer.to(change.dtype) - change
    is_whole = not (buffer.is_floating_point() or buffer.is_complex())
    return torch.where(change == 0, buffer, (less.round() if is_whole else less).to(buffer.dtype))
