"""Refuses the steps of optimizers that were not prepared and hold parameters of a prepared model.

One hook of torch's for the whole process, in which virtual workers are many, looks at each optimizer once.
"""

from collections.abc import Callable, Iterable
from typing import Any, final
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError

_MARK = "_paceline_looked_at"  # of an optimizer: that it is prepared, or what was looked at


@final
class UnpreparedSteps:
    """
    Args:
        optimizers: those that were prepared.
        may_step: whether others may step now, such as one that a prepared optimizer is made of.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], *, may_step: Callable[[], bool]
    ) -> None:
        self.may_step = may_step
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            setattr(optimizer, _MARK, True)
        _hook.add(self)

    def culprit_in(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The name of a parameter of the prepared model that the optimizer holds."""
        held = (self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        return next((name for name in held if name is not None), None)

    def close(self) -> None:
        for optimizer in self._optimizers:
            delattr(optimizer, _MARK)
        _hook.remove(self)


@final
class _Hook:
    """On every optimizer's step, while somebody watches."""

    def __init__(self) -> None:
        self._watching: WeakSet[UnpreparedSteps] = WeakSet()
        self._num_added = 0
        self._handle: RemovableHandle | None = None

    def add(self, watch: UnpreparedSteps) -> None:
        self._watching.add(watch)
        self._num_added += 1
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._look)

    def remove(self, watch: UnpreparedSteps) -> None:
        self._watching.discard(watch)
        if not self._watching and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look(self, optimizer: torch.optim.Optimizer, arguments: Any, settings: Any) -> None:
        mark = optimizer.__dict__.get(_MARK)
        if mark is True:
            return
        now = self._num_added, len(optimizer.param_groups)
        if mark == now:
            return
        for watch in self._watching:
            culprit = watch.culprit_in(optimizer)
            if culprit is not None:
                if watch.may_step():
                    return
                raise UsageError(
                    f"{type(optimizer).__name__} steps the parameter {culprit!r} of a prepared model and was not "
                    "prepared itself, so each worker would train it alone; give prepare every optimizer, by name: "
                    "prepare(model=..., optimizer_1=..., optimizer_2=..., data=...)"
                )
        setattr(optimizer, _MARK, now)


_hook = _Hook()
