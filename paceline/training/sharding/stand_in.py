"""Loaders that stand in the place of another one."""

from typing import Any

from paceline.errors import UsageError


class StandIn:
    """Has everything that the loader has in whose place it is, but for what it does itself."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:  # copy and pickle look before there is anything
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises UsageError for what the loader in whose place it is was made with, and reads batches by."""
        loader = self.__dict__.get("_loader")
        if name not in self.__dict__ and name in getattr(loader, "__dict__", ()):
            raise UsageError(
                f"the script sets {name} of the loader that prepare returned, which reads its data as it was prepared; "
                f"set it before prepare, or have what was given as {name} look at what is to change"
            )
        super().__setattr__(name, value)
