"""Counts a model's floating-point operations, layer by layer, during one forward pass."""

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_PER_OUTPUT = 4
"""Operations for each element of a layer's output, besides those that torch has formulas for."""


@final
class FlopCount(TorchDispatchMode):
    """Counts matrix products, convolutions and attention by torch's own formulas while it is entered, and every
    operation that is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop = 0.0
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            # In inference mode a whole layer arrives here, and only its parts have formulas.
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
            self.num_calls += 1
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        result = func(*args, **(kwargs or {}))
        self.flop += formula(*args, **(kwargs or {}), out_val=result)
        return result


@final
class ForwardCount:
    """Counts one forward pass, from its construction to `end`, and tells the parts of these parameters' layers
    apart."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._mode = model, FlopCount()
        self._flop_of: dict[int, float] = {}
        self._parameters = list(parameters)
        self._layers = _layers_of(model, parameters)
        self._hooks: list[Any] = []
        self._under_way: list[list[float]] = []  # for each layer: what was counted before it, and in its inner layers
        self._before(model, ())
        for layer in {id(layer): layer for layer in self._layers if layer is not None and layer is not model}.values():
            self._hooks += [layer.register_forward_pre_hook(self._before), layer.register_forward_hook(self._after)]
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, output: object) -> None:
        self._after(self._model, (), output)
        self.close()

    def close(self) -> None:
        """Count no further, also where the forward pass has failed."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    @property
    def flop(self) -> float:
        return self._mode.flop

    @property
    def num_calls(self) -> int:
        """How many operations were called, however large."""
        return self._mode.num_calls

    def shares(self) -> list[float]:
        """What part of the backward pass each parameter's gradient takes. The parts add up to 1.

        A layer's part is that of the forward pass; its parameters divide it by their sizes.
        """
        sizes: dict[int, int] = {}
        for parameter, layer in zip(self._parameters, self._layers, strict=True):
            sizes[id(layer)] = sizes.get(id(layer), 0) + parameter.numel()
        weights = [
            self._flop_of.get(id(layer), 0.0) * parameter.numel() / max(1, sizes[id(layer)])
            for parameter, layer in zip(self._parameters, self._layers, strict=True)
        ]
        total = sum(weights)
        return [weight / total if total else 1 / len(weights) for weight in weights]

    def _before(self, layer: nn.Module, inputs: object) -> None:
        self._under_way.append([self._mode.flop, 0.0])

    def _after(self, layer: nn.Module, inputs: object, output: object) -> None:
        before, inner = self._under_way.pop()
        whole = self._mode.flop - before
        own = whole - inner + _PER_OUTPUT * _num_elements(output)
        self._flop_of[id(layer)] = self._flop_of.get(id(layer), 0.0) + own
        if self._under_way:
            self._under_way[-1][1] += whole


def _layers_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[nn.Module | None]:
    """The module that holds each parameter, the first one where several do."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), module)
    return [owners.get(id(parameter)) for parameter in parameters]


def _num_elements(output: object) -> int:
    return output.numel() if isinstance(output, Tensor) else 0
