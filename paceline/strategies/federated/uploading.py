"""What a client sends of its change: encoded, and decoded by the server."""

from collections.abc import Sequence
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

from paceline.codec import Codec, TensorCodec
from paceline.codec.costs import EDGE, num_called
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

    def coding_s(self, changes: Sequence[Tensor], *, operation_s: float) -> float:
        """As the function of that name, of such changes."""
        num_bytes = 4 * sum(change.numel() for change in changes)
        return coding_s(self._codec, num_bytes, num_tensors=len(changes), operation_s=operation_s)


def coding_s(codec: TensorCodec, num_bytes: float, *, num_tensors: int, operation_s: float) -> float:
    """How long a core encodes a change of so many bytes of float32, and decodes it again.

    Args:
        num_tensors: in it, each of which is coded by itself.
        operation_s: what each operation takes besides its bytes.
    """
    return sum(codec.seconds_per_gbyte) * num_bytes / 1e9 + num_tensors * _num_operations(codec) * operation_s


@lru_cache(maxsize=256)
def _num_operations(codec: TensorCodec) -> int:
    """Of one tensor."""
    change, upload = torch.ones(EDGE, EDGE), Upload(codec, seed=0)
    left = [torch.zeros_like(change)] if codec.feedback else []
    return num_called(lambda: upload.passed([change], left, client=0, round_number=0))


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
