"""An optimizer's own `step` and `zero_grad` without what torch wraps around them for others, where there are none.

torch calls both inside of a mark for its profiler, and steps between hooks. The marks alone take some thirty calls in
Python, whether anybody profiles or not: more than Paceline's own part of a step.
"""

import sys
import types
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

_optimizers: Any = sys.modules[Optimizer.__module__]  # which torch.optim does not show
_profiler: Any = torch.autograd.profiler  # knows profilers of all threads, but not those that are no `profile`
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # in this thread, whatever has begun it
_WRAPPED = Optimizer.profile_hook_step(lambda this: None).__code__


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The optimizer's `step` without a closure. Where a profiler runs, or somebody has hooks on steps besides the one
    hook of `UnpreparedSteps`, which leaves prepared optimizers alone, torch's wrapper is called with all that it does.
    """
    whole: Any = optimizer.step
    if getattr(whole, "__self__", optimizer) is not optimizer:
        return whole  # type: ignore[no-any-return]  # another optimizer's
    wrapper = getattr(whole, "__func__", whole)
    if _code_of(wrapper).co_filename == lr_scheduler.__file__:  # which notes that there was a step, as `Steps` does
        wrapper = wrapper.__wrapped__
    if _code_of(wrapper) is not _WRAPPED:
        return whole  # type: ignore[no-any-return]  # the script has put its own there
    bare = wrapper.__wrapped__

    def step() -> Any:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if hooks or _optimizers._global_optimizer_post_hooks or len(_optimizers._global_optimizer_pre_hooks) > 1:
            return whole()
        return whole() if _profiler._is_profiler_enabled or _is_profiled() else bare(optimizer)

    return step


def _code_of(function: Any) -> CodeType:
    return getattr(function, "__code__", _code_of.__code__)


def bare_zero_grad(optimizer: Optimizer) -> None:
    """Have the optimizer's `zero_grad` do what it does most often, which is to drop gradients, by itself; for all else,
    and where a profiler runs, it calls torch's. Only on this object, and not where it has another one than torch's."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return
    whole = optimizer.zero_grad

    def zero_grad(this: Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none or _profiler._is_profiler_enabled or _is_profiled():
            whole(set_to_none)
            return
        for group in this.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
