"""Hears of a script's calls of its models, and of parts of these where it calls them by themselves."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.hooks import OwnHook
from paceline.training.sharding.contents import tensors_in


class _Depth(threading.local):
    """How many calls are under way in this thread. Another one, which reads batches, may listen anew meanwhile."""

    count = 0


@final
class Calls:
    """Listens to a model's calls. Where calls are within others, it is told of the outermost alone.

    Args:
        on_inputs: called with whether it is a part that is called, and with the tensors that it is given.
        on_output: called with what comes of it, before the next one is told.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        on_inputs: Callable[[bool, list[Tensor]], object],
        on_output: Callable[[Any], object],
    ) -> None:
        self._models, self._on_inputs, self._on_output = models, on_inputs, on_output
        self._hooks: list[RemovableHandle] = []
        self._of_parts: list[RemovableHandle] = []
        self._depth = _Depth()

    def listen(self, *, to_parts: bool) -> None:
        """Tell calls of models from here on, and those of their parts, or these no longer; none is under way in this
        thread."""
        self._depth.count = 0
        if not self._hooks:
            for model in self._models:
                self._hooks += self._hooked(model, is_part=False)
        if to_parts and not self._of_parts:
            for part in _parts(self._models):
                self._of_parts += self._hooked(part, is_part=True)
        elif not to_parts:
            self._of_parts = _removed(self._of_parts)

    def close(self) -> None:
        """Tell none from here on."""
        self._hooks, self._of_parts = _removed(self._hooks), _removed(self._of_parts)

    def _hooked(self, module: nn.Module, *, is_part: bool) -> list[RemovableHandle]:
        before, after = OwnHook(partial(self._begin, is_part)), OwnHook(self._end)
        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _begin(self, is_part: bool, _: nn.Module, arguments: Any, settings: Any) -> None:
        if is_transformed():
            return
        self._depth.count += 1
        if self._depth.count == 1:
            self._on_inputs(is_part, tensors_in([arguments, settings]))

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        if is_transformed() or not self._depth.count:  # it had begun before anybody listened
            return
        self._depth.count -= 1
        if self._depth.count == 0:
            self._on_output(output)


def is_transformed() -> bool:
    """Whether torch traces the script, or computes for torch.func, whose tensors have no memory and take no hooks."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _parts(models: Sequence[nn.Module]) -> list[nn.Module]:
    """What a script may call by itself; not of compiled models, which would be compiled anew with every hook."""
    every = {id(part): part for model in models for part in model.modules()}
    is_compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in every.values())
    return [] if is_compiled else [part for part in every.values() if part not in models]


def _removed(hooks: Sequence[RemovableHandle]) -> list[RemovableHandle]:
    for hook in hooks:
        hook.remove()
    return []
