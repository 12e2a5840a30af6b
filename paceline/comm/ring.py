"""Ring all-reduce, written once over send and receive.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009: every rank sends and
receives 2 (n - 1) / n times the tensor, whatever the number of ranks.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from paceline.comm.base import Collective, Work


def ring_mean(collective: Collective, tensor: Tensor) -> None:
    """Average the contiguous `tensor` over all ranks, in place; the same bits on every rank."""
    rank, size = collective.rank, collective.size
    flat = tensor.view(-1)
    if size == 1:
        return
    chunks = [flat[flat.numel() * i // size : flat.numel() * (i + 1) // size] for i in range(size)]
    incoming = torch.empty(max(chunk.numel() for chunk in chunks), dtype=flat.dtype, device=flat.device)
    for hop in range(size - 1):
        mine = chunks[(rank - hop - 1) % size]
        part = incoming[: mine.numel()]
        _shift(collective, chunks[(rank - hop) % size], part)
        mine.add_(part)
    chunks[(rank + 1) % size].div_(size)
    for hop in range(size - 1):
        _shift(collective, chunks[(rank + 1 - hop) % size], chunks[(rank - hop) % size])


def _shift(collective: Collective, outgoing: Tensor, incoming: Tensor) -> None:
    """Send to the next rank while receiving from the one before."""
    sending = collective.send(outgoing, destination=(collective.rank + 1) % collective.size)
    collective.recv(incoming, source=(collective.rank - 1) % collective.size)
    sending.wait()


@final
class RingWork(Work):
    """A ring all-reduce that runs when it is waited for."""

    def __init__(self, collective: Collective, tensor: Tensor) -> None:
        self._collective = collective
        self._tensor: Tensor | None = tensor

    def poll(self) -> bool:
        return self._tensor is None

    def wait(self) -> None:
        if self._tensor is not None:
            ring_mean(self._collective, self._tensor)
            self._tensor = None
