"""What a round has come to, which no worker changes until it counts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from paceline.arrays import clones
from paceline.comm.objects import decode_object, encode_object
from paceline.messages import Raw, raw_bytes, to_frames
from paceline.strategies.federated.joining import Joined


@final
class RoundResult(NamedTuple):
    """The same on all workers."""

    joined: Joined
    kept: Mapping[int, Mapping[str, Tensor]]
    """By client, what it keeps of its turn."""

    def copied(self) -> Self:
        """A copy of what is about to be changed as it is applied."""
        return self._replace(joined=self.joined._replace(gradients=clones(self.joined.gradients)))

    @classmethod
    def of_frames(cls, frames: Sequence[Raw]) -> Self:
        """What another worker has handed on."""
        raw = bytearray().join(map(raw_bytes, frames))
        gradients, num_contributions, is_last, trained, kept = decode_object(torch.frombuffer(raw, dtype=torch.uint8))
        return cls(Joined(gradients, num_contributions, is_last, (trained[0], trained[1])), kept)

    @property
    def frames(self) -> Sequence[Raw]:
        """For a worker that has missed the round's end."""
        gradients, *said = self.joined
        return to_frames([encode_object([list(gradients), *said, self.kept])])
