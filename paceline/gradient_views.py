"""Gradients in memory that every step uses again, and what becomes of those that a script keeps."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

_count_uses: Callable[[int], int] = torch._C._storage_Use_Count
_swap: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)  # which torch has not always had


def _in_own_storage(view: Tensor) -> Tensor:
    """The same memory, in a storage that no other tensor shares. Changes in place count for both."""
    own = view.detach()
    own.data = torch.from_dlpack(view)
    return own


# How many references this version of Python counts to a view that nobody else holds, asked for one and for all, and how
# many torch does to its storage.
_ALONE = [_in_own_storage(torch.zeros(1))]
_REFERENCES, _REFERENCES_OF_ALL = sys.getrefcount(_ALONE[0]), max(map(sys.getrefcount, _ALONE))
_USES = _count_uses(_ALONE[0].untyped_storage()._cdata)


def _counts_gradients() -> bool:
    """Whether Python counts the reference of a parameter to its gradient, which older releases of torch do not show."""
    parameter, views = torch.nn.Parameter(torch.zeros(1)), [torch.zeros(1)]
    parameter.grad = views[0]
    return sys.getrefcount(views[0]) > _REFERENCES


COUNTS_GRADIENTS = _counts_gradients()
"""Whether views are kept while they are gradients of parameters, too, and not only while a script holds them."""


@final
class GradientViews:
    """One tensor a gradient, in memory of somebody else's.

    A script may keep a gradient for longer than a step. Before another one takes its place in memory, `leave` gives it,
    and all tensors that share its storage, memory of their own.

    Args:
        views: the places, which may be parts of one tensor.
        memory: what each place is part of; it lives for as long as an array of numpy's may show it.
    """

    def __init__(self, views: Sequence[Tensor], memory: Sequence[Tensor]) -> None:
        self.views = list(map(_in_own_storage, views))
        self._memory = memory
        self._storages = [view.untyped_storage() for view in self.views]
        self._counted = [storage._cdata for storage in self._storages]  # of a thousand, asking anew takes 45 us

    def is_kept(self, index: int) -> bool:
        """Whether the script holds the view or shares its storage. The caller must not hold it."""
        return sys.getrefcount(self.views[index]) > _REFERENCES or _count_uses(self._counted[index]) > _USES

    def make_way(self, gradients: Sequence[Tensor]) -> None:
        """Have each view that the script keeps leave, unless it is the gradient that is to lie there."""
        if self.are_any_held():
            for index, gradient in enumerate(gradients):
                if gradient is not self.views[index] and self.is_kept(index):
                    self.leave(index)

    def leave_all(self) -> None:
        """Have all views that are held elsewhere leave, so that others may be laid here."""
        for index in range(len(self.views)):
            if self.is_kept(index):
                self.leave(index)

    def are_any_held(self) -> bool:
        """Whether any view is. For a thousand views this takes a fifth of the time of `is_kept` for each."""
        if max(map(sys.getrefcount, self.views)) > _REFERENCES_OF_ALL:
            return True
        return max(map(_count_uses, self._counted)) > _USES

    def leave(self, index: int) -> None:
        """The view is the script's from here on, in memory of its own; a new one is in its place."""
        kept = self.views[index]
        self.views[index] = view = kept.detach()
        elsewhere = kept.clone()
        if _swap is None:
            kept.data = elsewhere
            return
        storage, self._storages[index] = self._storages[index], elsewhere.untyped_storage()
        self._counted[index] = self._storages[index]._cdata
        _swap(storage, self._storages[index])
        view.data = elsewhere
        # An array of numpy's that the script has made of it has not moved: the memory stays for as long.
        storage.__dict__["_paceline_memory"] = self._memory[index]
