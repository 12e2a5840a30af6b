"""Loaders that stand in the place of another one."""

from typing import Any


class StandIn:
    """Has everything that the loader has in whose place it is, but for what it does itself."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:  # copy and pickle look before there is anything
            raise AttributeError(name)
        return getattr(self._loader, name)
