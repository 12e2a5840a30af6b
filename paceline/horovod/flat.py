"""Tensors of one dtype, one behind the other."""

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor


@final
class Flat(NamedTuple):
    """Memory that holds them, and where each of them lies there."""

    whole: Tensor
    views: list[Tensor]
    is_of_rows: bool
    """Whether all of them have one dimension."""

    @classmethod
    def cut(cls, whole: Tensor, shapes: Sequence[Sequence[int]]) -> "Flat":
        """Args:
        whole: of one dimension, as long as all shapes together.
        """
        parts = whole.split([math.prod(shape) for shape in shapes])
        views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return cls(whole, views, all(len(shape) == 1 for shape in shapes))

    def lay(self, tensors: Sequence[Tensor], *, are_near: bool) -> None:
        """Copy tensors of these shapes here, which lie elsewhere.

        Args:
            are_near: they are on the memory's own device.
        """
        if self.is_of_rows and are_near:
            torch.cat(list(tensors), out=self.whole)  # takes a third of what a copy of each does
        else:
            torch._foreach_copy_(self.views, list(tensors))
