"""What a client whose server is elsewhere does not know to have counted yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.strategies.own_state import OwnState

_TURN, _CONTROL, _LEFT = "sent.turn", "sent.control.", "sent.left."


@final
@dataclass(frozen=True)
class Sent:
    """A turn's update has left, or is about to, and this is what the client keeps of it if it counts."""

    round: int
    """Of the server's."""
    client: int
    controls: Sequence[Tensor]
    left: Sequence[Tensor]
    """What a codec left out."""

    def own_state(self) -> dict[str, OwnState]:
        tensors = {_TURN: torch.tensor([self.round, self.client])}
        for prefix, each in ((_CONTROL, self.controls), (_LEFT, self.left)):
            tensors |= {f"{prefix}{index}": tensor for index, tensor in enumerate(each)}
        return {name: OwnState(tensor) for name, tensor in tensors.items()}

    @classmethod
    def restored(cls, own: Mapping[str, Tensor]) -> "Sent | None":
        """What `own_state` gave, if it is there."""
        if _TURN not in own:
            return None
        number, client = own[_TURN].tolist()
        return cls(number, client, _numbered(own, _CONTROL), _numbered(own, _LEFT))


def _numbered(own: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    return [own[f"{prefix}{index}"] for index in range(sum(name.startswith(prefix) for name in own))]
