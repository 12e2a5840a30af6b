"""What a client sends of its change: encoded, and decoded by the server."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from paceline.codec import Codec, TensorCodec
from paceline.errors import UsageError
from paceline.seeding import derive


@final
class Upload:
    """
    Args:
        seed: the run's; codecs that draw numbers draw others for each client, but for linear ones.
    """

    def __init__(self, codec: TensorCodec, *, seed: int) -> None:
        self._codec, self._seed = codec, seed

    @torch.no_grad()
    def passed(
        self, changes: Sequence[Tensor], left: Sequence[Tensor], *, client: int, round_number: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What the server decodes, and what the client keeps of what was left out (Seide et al., Interspeech 2014).

        Args:
            left: what it has kept, one a change; none: it keeps nothing, or has nothing yet.
        """
        codec, decoded, kept = self._codec, [], []
        for index, change in enumerate(changes):
            whole = change + codec.decay * left[index] if left else change
            of = () if codec.linear else (client,)
            seed = derive(self._seed, "upload", round_number, index, *of)
            decoded.append(codec.decode(codec.encode(whole, seed=seed), whole, seed=seed))
            kept.append(whole - decoded[-1])
        return decoded, kept if codec.feedback else []

    def num_bytes(self, changes: Sequence[Tensor]) -> int:
        """Of all that a client sends of its change."""
        return sum(self._codec.num_bytes(tuple(change.shape)) for change in changes)


def require_of_clients(codec: Codec, *, keeps_state: bool, is_private: bool, is_secure: bool) -> TensorCodec:
    """The codec, which clients may use. Raises UsageError, with the reason, for another.

    Args:
        keeps_state: clients keep something from turn to turn.
        is_private: changes are clipped, and under noise.
        is_secure: the server learns the sum of changes alone.
    """
    reasons = {
        "averages among workers half-way, and clients know nobody else": codec.joint,
        "is joined by a vote, which has no size for the server to step with": codec.votes,
        "is chosen by the time that steps take, and clients are not timed; name one": codec.adapts,
        "adds what it leaves out to the client's next change, and clients keep no state; take one without, such as "
        f"{codec.name}:feedback=false or qsgd, or have them keep some with optimizer=kept": codec.feedback
        and not keeps_state,
        "may decode to more than privacy has clipped; leave one of the two out": is_private,
        "chooses and scales what it sends by each change, so that masked payloads have no sum; use random-k": is_secure
        and not codec.linear,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"codec={codec} {reason}")
    assert isinstance(codec, TensorCodec)  # what is not joint encodes by itself
    return codec
