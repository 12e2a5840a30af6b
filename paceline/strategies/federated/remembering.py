"""What clients have sent so far, for aggregators that look at it."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.aggregate import Contribution
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.strategies.federated.kept import Kept
from paceline.strategies.own_state import OwnState

_SUM, _SENT = "sum", "sent."
_MOST_BYTES = 16e9
"""Bytes of all clients' sums, at most. The first worker has them in memory whenever a checkpoint is taken."""


def require_room(num_clients: int, parameters: Sequence[Tensor]) -> None:
    """Raises UsageError where the sums of so many clients are too large for checkpoints."""
    num_bytes = num_clients * sum(map(Tensor.numel, parameters)) * torch.float64.itemsize
    if num_bytes > _MOST_BYTES:
        raise UsageError(
            f"an aggregate that remembers keeps a sum for each of {num_clients} clients, {num_bytes / 1e9:.1f} GB in "
            f"every checkpoint, and {_MOST_BYTES / 1e9:.0f} GB is the most; lower clients, or use another aggregate"
        )


@final
class Memory:
    """The sum of all that each client has sent. Each worker keeps a part of every client's, in a file."""

    def __init__(self, collective: Collective) -> None:
        self._collective, self._kept = collective, Kept()

    def gram(self, contributions: Sequence[Contribution]) -> Tensor:
        """Inner products of the senders' sums, with these in them: float64, of shape (n, n). Collective call."""
        collective = self._collective
        rows = []
        for each in contributions:
            whole = torch.cat([tensor.reshape(-1).to("cpu", torch.float64) for tensor in each.gradients])
            part = whole.tensor_split(collective.size)[collective.rank]
            rows.append(part + self._kept[each.sender].get(_SUM, torch.zeros_like(part)))
            self._kept.put(each.sender, {_SUM: rows[-1]})
        stacked = torch.stack(rows)
        gram = stacked @ stacked.T
        collective.all_reduce(gram, op="sum").wait()
        return gram

    def own_state(self) -> dict[str, OwnState]:
        return {f"{_SENT}{client}": OwnState(self._kept[client][_SUM]) for client in self._kept}

    def restore(self, own: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave, as far as it is there."""
        for name, tensor in own.items():
            if name.startswith(_SENT):
                self._kept.put(int(name.removeprefix(_SENT)), {_SUM: tensor})

    def close(self) -> None:
        self._kept.close()
