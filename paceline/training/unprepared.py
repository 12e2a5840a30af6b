"""Refuses the steps of optimizers that were not prepared, by which each worker would train something alone.

One hook of torch's for the whole process, in which virtual workers are many, looks at each optimizer.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, final
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.hooks import Telling
from paceline.strategies.replica import named_parameters_of
from paceline.training.outside import OWN

_MARK = "_paceline_looked_at"  # of an optimizer: that it is prepared, or what was looked at
_FIRST = "_paceline_first_step"  # of an optimizer that was not: how many prepared steps there were at its first one


@final
class UnpreparedSteps:
    """
    Args:
        optimizers: those that were prepared.
        may_step: whether others may step now, such as one that a prepared optimizer is made of.
        may_train_others: whether they may train parameters of no prepared model from one batch to the next, which on
            other workers would become others. What they train for one batch alone, as adversarial examples are, is
            the batch's.
        num_steps: how many steps prepared optimizers have taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        rank: int,
        may_step: Callable[[], bool],
        may_train_others: Callable[[], bool],
        num_steps: Callable[[], int],
    ) -> None:
        self.may_step, self._rank, self.tell = may_step, rank, Telling()
        self._may_train_others, self._num_steps = may_train_others, num_steps
        self._names = {id(parameter): name for name, parameter in named_parameters_of(model)}
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            setattr(optimizer, _MARK, True)
        _hook.add(self)
        _here.set(self)

    def culprit_in(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The name of a parameter of the prepared model that the optimizer holds."""
        held = (self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        return next((name for name in held if name is not None), None)

    def look_at_strange(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError if it trains what is of no prepared model, and this is not its first batch."""
        if getattr(optimizer, OWN, False):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    setattr(parameter, OWN, True)
            return
        if self.may_step() or self._may_train_others():
            return
        now = self._num_steps()
        if optimizer.__dict__.setdefault(_FIRST, now) != now:
            shapes = [list(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]
            raise UsageError(
                f"rank {self._rank}: {type(optimizer).__name__} was not prepared and trains, batch after batch, "
                f"parameters of no prepared model (the first is of shape {shapes[0]}), so each worker would train them "
                "alone; give prepare every model and every optimizer, by name: prepare(generator=..., "
                "discriminator=..., optimizer_g=..., optimizer_d=..., data=...). If each worker is to have its own, "
                f"set optimizer.{OWN} = True"
            )

    def close(self) -> None:
        for optimizer in self._optimizers:
            delattr(optimizer, _MARK)
        _hook.remove(self)


@final
class _Hook:
    """Looks at every optimizer's step while somebody watches."""

    def __init__(self) -> None:
        self._watching: WeakSet[UnpreparedSteps] = WeakSet()
        self._num_added = 0
        self._handle: RemovableHandle | None = None

    def add(self, watch: UnpreparedSteps) -> None:
        self._watching.add(watch)
        self._num_added += 1
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._look_and_tell)

    def remove(self, watch: UnpreparedSteps) -> None:
        self._watching.discard(watch)
        if not self._watching and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look_and_tell(self, optimizer: torch.optim.Optimizer, arguments: Any, settings: Any) -> None:
        if optimizer.__dict__.get(_MARK) is True:
            return
        watch = _here.get()
        with nullcontext() if watch is None else watch.tell:
            self._look(optimizer)

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        mark = optimizer.__dict__.get(_MARK)
        now = self._num_added, len(optimizer.param_groups)
        if mark == now:
            self._look_at_strange(optimizer)
            return
        for watch in self._watching:
            culprit = watch.culprit_in(optimizer)
            if culprit is not None:
                if watch.may_step():
                    return
                raise UsageError(
                    f"{type(optimizer).__name__} steps the parameter {culprit!r} of a prepared model and was not "
                    "prepared itself, so each worker would train it alone; give prepare every optimizer, by name: "
                    "prepare(model=..., optimizer_1=..., optimizer_2=..., data=...). If it is to take the "
                    "prepared one's place, make it before prepare"
                )
        setattr(optimizer, _MARK, now)
        self._look_at_strange(optimizer)

    def _look_at_strange(self, optimizer: torch.optim.Optimizer) -> None:
        watch = _here.get()
        if watch is not None and watch in self._watching:
            watch.look_at_strange(optimizer)


_here: ContextVar[UnpreparedSteps | None] = ContextVar("unprepared_steps", default=None)
"""The watch of the worker that runs here: virtual ones have a context each."""
_hook = _Hook()
