"""The script's evaluation while it runs: on one rank alone, which must not ask others for anything."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.hooks import OwnHook, backward_calls


@final
class Evaluating:
    """Refuses backward passes through the model itself, whose gradients workers would exchange; copies of the model,
    gradients of inputs and `torch.autograd.grad` are the evaluation's own."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._is_in_backward = False

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        hook = OwnHook(self._refuse)
        hooks = [parameter.register_hook(hook) for parameter in model.parameters() if parameter.requires_grad]
        backward_calls.add(self)
        try:
            yield
        finally:
            backward_calls.remove(self)
            for each in hooks:
                each.remove()

    def look(self, backward: Callable[..., Any], tensors: Any, *more: Any, **named: Any) -> Any:
        """The evaluation calls `backward`."""
        self._is_in_backward = True
        try:
            return backward(tensors, *more, **named)
        finally:
            self._is_in_backward = False

    def _refuse(self, gradient: Tensor) -> None:
        if self._is_in_backward:
            raise UsageError(
                f"rank {self._rank}: the evaluation calls backward() on the model itself, whose gradients all workers "
                "exchange, and it runs on this rank alone; train or differentiate a copy, copy.deepcopy(model), or "
                "take torch.autograd.grad(loss, inputs)"
            )
