"""Whether tensors look as others did, without a thought to each of them."""

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # it is torch's own, and another release may lack it: then each tensor is looked at
    TensorGuards = None  # type: ignore[assignment,misc]


@final
class Likeness:
    """How a group of tensors looks: dtypes, shapes, strides, devices, layouts.

    It keeps none of them. Torch's own check, by which compiled code knows its inputs again, takes a tenth of what
    Python takes to look at each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], about: Any) -> None:
        """Args:
        tensors: dense ones.
        about: what else must be equal.
        """
        self._about, self._count = about, len(tensors)
        self._guards: Any = None
        if TensorGuards is None:
            return
        shapes: list[Any] = [[*each.shape] for each in tensors]
        strides: list[Any] = [[*each.stride()] for each in tensors]
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)

    def is_of(self, tensors: Sequence[Tensor], about: Any) -> bool:
        """Whether these look so, too. False also where torch tells apart what is alike: a tensor that is there twice,
        or one that wants a gradient."""
        if self._guards is None:
            return False
        return about == self._about and len(tensors) == self._count and self._guards.check(*tensors)
