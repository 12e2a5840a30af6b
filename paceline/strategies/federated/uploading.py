"""What a client sends of its change: encoded, and decoded by the server."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from paceline.codec import Codec, TensorCodec
from paceline.errors import UsageError
from paceline.layout import TensorSpec
from paceline.seeding import derive


@final
class Upload:
    """
    Args:
        seed: the run's; codecs that draw numbers draw others for each client, but for linear ones.
    """

    def __init__(self, codec: TensorCodec, *, seed: int) -> None:
        self._codec, self._seed = codec, seed

    def specs(self, like: Sequence[Tensor]) -> list[TensorSpec]:
        """What such changes travel as."""
        payloads = [self._codec.encode(torch.zeros_like(each), seed=0) for each in like]
        return [
            TensorSpec(f"payload.{number}.{index}", tuple(part.shape), part.dtype)
            for number, payload in enumerate(payloads)
            for index, part in enumerate(payload)
        ]

    @torch.no_grad()
    def passed(
        self, changes: Sequence[Tensor], left: Sequence[Tensor], *, client: int, round_number: int
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """What the server decodes, what the client keeps of what was left out (Seide et al., Interspeech 2014), and
        what travels.

        Args:
            left: what it has kept, one a change; none: it keeps nothing, or has nothing yet.
        """
        codec, decoded, kept = self._codec, [], []
        parts: list[Tensor] = []
        for index, change in enumerate(changes):
            whole = change + codec.decay * left[index] if left else change
            seed = self._seed_of(client, round_number, index)
            payload = codec.encode(whole, seed=seed)
            parts += payload
            decoded.append(codec.decode(payload, whole, seed=seed))
            kept.append(whole - decoded[-1])
        return decoded, kept if codec.feedback else [], parts

    @torch.no_grad()
    def decoded(
        self, parts: Sequence[Tensor], like: Sequence[Tensor], *, client: int, round_number: int
    ) -> list[Tensor]:
        """The changes that travelled as these parts. Raises ValueError for parts that no change travels as."""
        num_parts, found = len(parts) // len(like), []
        for index, each in enumerate(like):
            payload = tuple(parts[index * num_parts : (index + 1) * num_parts])
            seed = self._seed_of(client, round_number, index)
            try:
                found.append(self._codec.decode(payload, each, seed=seed))
            except (IndexError, RuntimeError) as error:
                raise ValueError(f"its change number {index} cannot be decoded: {error}") from None
        return found

    def _seed_of(self, client: int, round_number: int, index: int) -> int:
        of = () if self._codec.linear else (client,)
        return derive(self._seed, "upload", round_number, index, *of)

    def num_bytes(self, changes: Sequence[Tensor]) -> int:
        """Bytes of all that a client sends of its change."""
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
