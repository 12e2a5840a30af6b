"""Notices a script that reads gradients, at no cost outside the steps in which somebody looks."""

import inspect
import sys
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.hooks import place_in_script

_GRADIENT: Any = Tensor.grad
_CLEARING = {inspect.unwrap(kind.zero_grad).__code__ for kind in (Optimizer, nn.Module)}
"""Looks at gradients to throw them away, which a script may do to those of an optimizer that it does not step."""
_MARK = "_paceline_gradient_read"


@final
class GradientReads:
    """Between `begin` and `end` the parameters are of a class that tells. torch's own code in C++ is not noticed."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._watched: list[nn.Parameter] = []

    def begin(self) -> None:
        """Goes on where it has begun already, as after the second backward pass of a step."""
        if self._watched:
            return
        self._watched = [parameter for parameter in self._parameters if type(parameter) is nn.Parameter]
        for parameter in self._watched:
            parameter.__class__ = _Watched

    def end(self) -> str:
        """Where a gradient was read since `begin`, as `train.py:31`; empty if none was."""
        watched, self._watched = self._watched, []
        for parameter in watched:
            parameter.__class__ = nn.Parameter
        marks = [parameter.__dict__.pop(_MARK, "") for parameter in watched]
        return next(filter(None, marks), "")


class _Watched(nn.Parameter):
    @property
    def grad(self) -> Any:
        reader = sys._getframe(1)
        if reader.f_code not in _CLEARING:
            self.__dict__[_MARK] = str(place_in_script())
        return _GRADIENT.__get__(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRADIENT.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRADIENT.__delete__(self)
