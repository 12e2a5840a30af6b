"""Memory that parameter servers reach, and its twin on the model's device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor


@final
class Mirror:
    """One flat buffer on the model's device and its twin in memory that the servers reach; the same on a CPU."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        self.local = host if host.device == device else torch.zeros_like(host, device=device)

    def to_host(self) -> None:
        if self.local is not self.host:
            self.host.copy_(self.local)

    def to_device(self) -> None:
        if self.local is not self.host:
            self.local.copy_(self.host)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have both hold afterwards what they hold now."""
        before = self.host.clone()
        try:
            yield
        finally:
            self.host.copy_(before)
            self.to_device()
