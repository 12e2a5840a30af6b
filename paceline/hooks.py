"""Hooks on a script's module that stay with it, whatever the script copies or saves."""

from collections.abc import Callable
from typing import Any, final


@final
class OwnHook:
    """A hook of this module alone: copies of the module, and what is unpickled of it, have one that does nothing.

    Without it `copy.deepcopy(model)` and `torch.save(model)` would take along what the hook's method belongs to.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _no_hook, ()


def _nothing(*_: object) -> None:
    return None


def _no_hook() -> Callable[..., None]:
    return _nothing
