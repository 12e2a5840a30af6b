"""Checks of what is handed to a collective, and the one memory layout that all of them move."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from paceline.errors import UsageError


def require_root(root: int, *, size: int) -> None:
    """Raise `UsageError` unless `root` is a rank."""
    if not 0 <= root < size:
        raise UsageError(f"root {root} is not a rank of a world of {size}")


def require_other(other: int, *, rank: int, size: int) -> None:
    """Raise `UsageError` unless `other` is a rank that `rank` can send to and receive from."""
    if not 0 <= other < size or other == rank:
        raise UsageError(f"rank {other} is not another rank of a world of {size}; this one is {rank}")


def require_one_each(tensors: Sequence[Tensor], *, size: int) -> None:
    """Raise `UsageError` unless there is one tensor a rank, `TypeError` unless they have one dtype."""
    if len(tensors) != size:
        raise UsageError(f"one tensor for each of {size} ranks is needed, not {len(tensors)}")
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"the tensors of one operation must have one dtype, not {', '.join(sorted(dtypes))}")


def require_from_root(tensors: Sequence[Tensor] | None, *, root: int, rank: int, size: int) -> None:
    """Raise `UsageError` unless the root, and nobody else, gives one tensor a rank; `TypeError` as for those."""
    require_root(root, size=size)
    if rank == root:
        require_one_each(tensors or (), size=size)
    elif tensors is not None:
        raise UsageError(f"only the root, rank {root}, gives tensors to scatter; rank {rank} must give None")


def flatten(tensor: Tensor, *, device_type: str, is_target: bool = False) -> tuple[Tensor, Callable[[], None] | None]:
    """The tensor as contiguous 1-D memory on `device_type` and, where that is a copy, what copies it back.

    A tensor on another device, such as those of workers that share a GPU, is staged through a copy. Raises TypeError if
    the tensor is not dense or has no memory, ValueError if elements of a target share their place.
    """
    here = tensor.device.type
    if here == "meta" or tensor.layout != torch.strided:
        raise TypeError(f"only dense tensors can be moved, not a {tensor.layout} one on {tensor.device}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    is_here = here == device_type
    if is_here and tensor.is_contiguous():
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        # One element or none is contiguous whatever its stride, but viewing its bytes takes stride 1.
        return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))), None
    if is_target and shares_places(tensor):
        raise ValueError(f"elements of a {list(tensor.shape)} tensor share memory, as after expand(); pass a clone")
    copy = tensor.contiguous() if is_here else tensor.contiguous().to(device_type)

    def copy_back() -> None:
        tensor.copy_(copy)

    return copy.view(-1), copy_back


def shares_places(tensor: Tensor) -> bool:
    """Whether several elements lie in one place."""
    if tensor.layout != torch.strided:
        return False
    return any(stride == 0 < length - 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


def pieces(flat: Tensor, length: int) -> list[Tensor]:
    """Consecutive views of at most `length` elements; one empty view of an empty tensor."""
    return [flat[start : start + length] for start in range(0, flat.numel(), length)] or [flat]


def timeout_of(deadline_s: float | None) -> timedelta:
    """A deadline as torch.distributed takes it, which has no "for ever"."""
    return timedelta(days=365) if deadline_s is None else timedelta(seconds=deadline_s)
