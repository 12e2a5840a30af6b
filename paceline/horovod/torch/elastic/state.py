"""The state of training with torch: models, optimizers, samplers, and plain objects."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from paceline.horovod import runtime as basics
from paceline.horovod.common.elastic import ObjectState
from paceline.horovod.torch.elastic.sampler import ElasticSampler
from paceline.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler(ABC):
    """Keeps and brings together one value."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep it as it is now."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to what was kept."""
        self.value.load_state_dict(self._saved)

    @abstractmethod
    def sync(self) -> None:
        """Take over the first rank's. Collective call."""

    def reset(self) -> None:
        """Adapt to the new ranks."""

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()

    def reset(self) -> None:
        self.value.reset()


_Registry = list[tuple[type, Callable[[Any], StateHandler]]]
_handler_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """By type, what makes the handler of a value of that type."""
    return _handler_registry


def set_handler_registry(registry: _Registry) -> None:
    """Use these from here on."""
    global _handler_registry
    _handler_registry = registry


class TorchState(ObjectState):
    """Models, optimizers and samplers by their own handlers, all else as plain objects; each an attribute by its name.

    Args:
        model, optimizer: several have names of their own in `kwargs`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler_of(value) for name, value in values.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        plain = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=lambda: basics.runtime().rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_handlers" and hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _handler_of(value: Any) -> StateHandler | None:
    for kind, make in _handler_registry:
        if isinstance(value, kind):
            return make(value)
    return None
