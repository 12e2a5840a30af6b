"""Loaders that stand in the place of another one."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError

_READS_BY = frozenset(vars(DataLoader(TensorDataset(torch.zeros(1)))))
"""What torch's loader reads batches by."""


class StandIn:
    """Has everything that the loader has in whose place it is, but for what it does itself."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:  # copy and pickle look before there is anything
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is the script's own goes to the loader in whose place it is. Raises UsageError for what that one was
        made with, and reads batches by."""
        loader = self.__dict__.get("_loader")
        if name in self.__dict__ or name not in getattr(loader, "__dict__", ()):
            super().__setattr__(name, value)
        elif name in _READS_BY:
            raise UsageError(
                f"the script sets {name} of the loader that prepare returned, which reads its data as it was prepared; "
                f"set it before prepare, or have what was given as {name} look at what is to change"
            )
        else:
            setattr(loader, name, value)
