"""What modules keep besides tensors, and give by `get_extra_state`: a checkpoint holds it."""

from typing import Any, final

from torch import nn

from paceline.checkpoint import require_plain

NAME = "extra states of modules"


@final
class ExtraStates:
    """Those of a model, by the modules' names. Tensors among them are in its `state_dict`, as torch recommends, and so
    in checkpoints anyway.

    Raises:
        UsageError: a state is no plain data, which a checkpoint could not hold.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {name: module for name, module in model.named_modules() if _has_own(module)}
        for name, state in self.state_dict().items():
            require_plain(f"the extra state of the module {name or 'itself'!r}", state)

    def __bool__(self) -> bool:
        return bool(self._modules)

    def state_dict(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What this model has no module for any more is left out."""
        for name, module in self._modules.items():
            if name in state:
                module.set_extra_state(state[name])


def _has_own(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
