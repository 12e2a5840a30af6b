"""What workers push through a codec: each tensor of every shard, encoded by a worker and decoded by its server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from paceline.codec import TensorCodec, as_bytes, memory_of
from paceline.codec.costs import EDGE, Speed, num_called
from paceline.codec.joining import form_of
from paceline.layout import Layout
from paceline.messages import Message, WireError, from_frames, to_frames
from paceline.seeding import derive
from paceline.server.ranges import KeyRange


@dataclass(frozen=True)
class PushCoding:
    """
    Args:
        left: what has been left out of pushes so far, laid out like the model; none: it is forgotten.
        beside: what servers on this worker's host get is coded, too.
        is_weighted: an update is of all workers' pushes, whose weights always add up to as much. So what is left out of
            one is kept as it would have counted there, and counts as much in one of another weight.
        spend: where time is simulated: coding has taken so many seconds.
        operation_s: what each operation takes then, besides its bytes.
    """

    codec: TensorCodec
    seed: int
    left: Tensor | None = None
    beside: bool = False
    is_weighted: bool = False
    spend: Callable[[float], None] | None = None
    operation_s: float = 0.0


@dataclass
class _Shard:
    gradients: list[Tensor]
    left: list[Tensor] | None
    """This worker's, of what was pushed up to now."""
    left_next: list[Tensor] = field(default_factory=list)
    """If the last push is applied."""
    raw: Tensor | None = None
    """The push that is under way; none: there is none, or it goes without the codec."""
    may_owe: bool = True
    """Whether something may be left."""


@final
class CodedPushes:
    """One worker's pushes to one server.

    A push is encoded once, whichever servers it is sent to: another one may take this one's place. What is left out
    counts only when the server says that it has applied the push. Servers never say so of a push that
    stands in. So that nothing comes twice, it brings nothing of what is owed.

    Args:
        server: its index in the group.
        gradients: for each shard, where the worker has them.
    """

    def __init__(
        self,
        coding: PushCoding,
        layout: Layout,
        shards: Sequence[KeyRange],
        gradients: Sequence[Sequence[Tensor]],
        *,
        server: int,
        rank: int,
    ) -> None:
        left = coding.left
        self._shards = [
            _Shard(list(tensors), None if left is None else [piece.view(layout, left) for piece in pieces])
            for pieces, tensors in zip(shards, gradients, strict=True)
        ]
        self._coding, self._memory, self._server, self._rank = coding, memory_of(coding.codec), server, rank
        self._seed = 0

    def codes(self, *, is_beside: bool) -> bool:
        """Whether what a server gets goes through the codec."""
        return self._coding.beside or not is_beside

    def take_along(self, *, stands_in: bool, weight: float = 1.0) -> None:
        """The gradients are there, and become what is owed in all: they go as they are, and nothing is left out.

        Args:
            weight: of the push.
        """
        for part in self._shards:
            part.raw = None
            if part.left is None or not part.may_owe or stands_in:
                continue
            for tensor, left in zip(part.gradients, part.left, strict=True):
                tensor.add_(left, alpha=self._coding.codec.decay / self._counted(weight))
            part.left_next = [torch.zeros_like(left) for left in part.left]

    def encode(self, *, step: int, stands_in: bool, weight: float = 1.0) -> None:
        """The gradients are there.

        Args:
            stands_in: they are of another worker's samples.
            weight: of the push.
        """
        codec, counted = self._coding.codec, self._counted(weight)
        self._seed = derive(self._coding.seed, "push", step, self._rank)
        for shard, part in enumerate(self._shards):
            payloads: list[Tensor] = []
            part.left_next = []
            for number, tensor in enumerate(part.gradients):
                seed = derive(self._seed, self._server, shard, number)
                before = None if part.left is None or stands_in else part.left[number]
                if before is not None and counted != 1.0:
                    before = before / counted
                payload, after = self._memory.encode(codec, tensor, before, seed=seed)
                payloads += payload
                if after is not None:
                    part.left_next.append(after if counted == 1.0 else after.mul_(counted))
            part.raw = as_bytes(tuple(payloads))
        self._spend(lambda: self._coding_s[0])

    def _counted(self, weight: float) -> float:
        """By how much what is left out of a push of this weight would have counted."""
        return weight if self._coding.is_weighted and weight else 1.0

    def decode_in_place(self, *, by_server: bool = False) -> None:
        """The server reads the gradients where the worker has them: those of a push that is under way become what it
        would decode.

        Args:
            by_server: where time is simulated, it is the server that takes the time for it.
        """
        for shard, part in enumerate(self._shards):
            if part.raw is not None:
                codec, seed = self._coding.codec, self._seed
                _decode(codec, part.raw, part.gradients, seed=seed, server=self._server, shard=shard)
        if self.is_encoded and not by_server:
            self._spend(lambda: self._coding_s[1])

    def _spend(self, coding_s: Callable[[], float]) -> None:
        if self._coding.spend is not None:
            self._coding.spend(coding_s())

    @property
    def _coding_s(self) -> tuple[float, float]:
        """How long it takes to encode a push, and to decode it."""
        tensors = [tensor for shard in self._shards for tensor in shard.gradients]
        num_elements = sum(tensor.numel() for tensor in tensors)
        return push_coding_s(
            self._coding.codec, 4 * num_elements, num_tensors=len(tensors), operation_s=self._coding.operation_s
        )

    @property
    def is_encoded(self) -> bool:
        """Whether the push that is under way goes through the codec."""
        return all(shard.raw is not None for shard in self._shards)

    def shard_bytes(self, shard: int) -> int:
        raw = self._shards[shard].raw
        assert raw is not None
        return raw.numel()

    @property
    def num_bytes(self) -> int:
        return sum(self.shard_bytes(shard) for shard in range(len(self._shards)))

    @property
    def body(self) -> dict[str, Any]:
        """What the server has to know besides the bytes."""
        return {"seed": self._seed} if self._coding.codec.linear else {}

    def frames(self, shard: int) -> list[memoryview]:
        raw = self._shards[shard].raw
        assert raw is not None
        return to_frames([raw])

    def settle(self, *, is_applied: bool) -> None:
        for shard in self._shards:
            if is_applied and shard.left is not None and shard.left_next:
                for left, after in zip(shard.left, shard.left_next, strict=True):
                    left.copy_(after)
                shard.may_owe = shard.raw is not None
            shard.left_next, shard.raw = [], None


def push_coding_s(
    codec: TensorCodec, num_bytes: float, *, num_tensors: float, operation_s: float
) -> tuple[float, float]:
    """How long a core encodes so many bytes of float32 for a push, with what was left out before, and decodes them.

    Args:
        num_tensors: in it, each of which is coded by itself.
        operation_s: what each operation takes besides its bytes.
    """
    speed, (encoding, decoding) = Speed.said(codec), _num_operations(codec)
    bytes_s = (speed.encode_s + speed.decode_s * codec.feedback, speed.decode_s)
    encode_s, decode_s = (
        each_s * num_bytes / 1e9 + count * num_tensors * operation_s
        for each_s, count in zip(bytes_s, (encoding, decoding), strict=True)
    )
    return encode_s, decode_s


@lru_cache(maxsize=256)
def _num_operations(codec: TensorCodec) -> tuple[int, int]:
    """Of encoding one tensor, and of decoding it."""
    tensor, target, memory = torch.ones(EDGE**2), torch.empty(EDGE**2), memory_of(codec)
    left = memory.start(tensor)

    def encode() -> Tensor:
        payload, after = memory.encode(codec, tensor, left, seed=0)
        if left is not None and after is not None:
            left.copy_(after)
        return as_bytes(payload)

    raw = encode()
    return num_called(encode), num_called(lambda: _decode(codec, raw, [target], seed=0, server=0, shard=0))


def decode_push(codec: TensorCodec, message: Message, targets: Sequence[Tensor], *, server: int, shard: int) -> None:
    """Put what a worker encoded where its gradients belong. Raises WireError if it cannot have been so encoded."""
    raw = torch.empty(sum(form_of(codec, tuple(target.shape)).num_bytes for target in targets), dtype=torch.uint8)
    from_frames(message.payload, [raw])
    try:
        _decode(codec, raw, targets, seed=message.body.get("seed", 0), server=server, shard=shard)
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        raise WireError(f"refused a push that codec {codec} cannot decode: {error}") from None


def _decode(codec: TensorCodec, raw: Tensor, targets: Sequence[Tensor], *, seed: int, server: int, shard: int) -> None:
    forms = [form_of(codec, tuple(target.shape)) for target in targets]
    pieces = raw.split([form.num_bytes for form in forms])
    for number, (form, piece, target) in enumerate(zip(forms, pieces, targets, strict=True)):
        target.copy_(codec.decode(form.read(piece), target, seed=derive(seed, server, shard, number)))
