"""One server, as a worker's end of the protocol sees it: what it has of the model, and what it is pushed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.messages import UNCODED, Message, to_frames
from paceline.server.coded_push import CodedPushes
from paceline.server.ranges import KeyRange
from paceline.server.windows import SendWindow

Request = Callable[..., Message]
"""Makes a message, with further fields."""


@dataclass
class AskedServer:
    """One server, as this worker sees it."""

    carries_bytes: bool
    """Messages to one elsewhere hold tensors as frames; else they only stand for them."""
    is_beside: bool
    """It is on this host: it reads and writes this worker's memory, and takes one request for all its shards."""
    epoch: int
    """Of messages to and from it."""
    is_new: bool = False
    """It has taken another one's key range, and has yet to say that it knows this worker."""
    pieces: KeyRange = ()
    parameters: list[list[Tensor]] = field(default_factory=list)
    """This worker's, for each of the server's shards."""
    gradients: list[list[Tensor]] = field(default_factory=list)
    shard_bytes: list[int] = field(default_factory=list)
    range_bytes: int = 0
    coded: CodedPushes | None = None
    """Pushes to some servers go through a codec."""
    follows: bool = False
    """It has to be told what the first server decided."""
    is_in_turn: bool = False
    """Pieces are to go a few at a time."""
    window: SendWindow[Message] | None = None
    """What it has yet to be asked, where pieces go a few at a time."""
    num_due: int = 0
    """Answers to come."""
    answers: list[Message] = field(default_factory=list)

    @property
    def waits_for_decision(self) -> bool:
        """Whether it gets a push together with what the first server decided: beside, it takes one request."""
        return self.follows and self.is_beside

    @property
    def is_coded(self) -> bool:
        """Whether pushes to this one go through a codec."""
        return self.coded is not None and self.coded.codes(is_beside=self.is_beside)

    @property
    def pushed_bytes(self) -> int:
        """Of tensors in a push."""
        return self.range_bytes if self.coded is None or not self.coded.is_encoded else self.coded.num_bytes

    def pushed(self, request: Request) -> list[Message]:
        """Messages with the gradients, as a codec may have made them."""
        coded = self.coded
        if coded is None or not coded.is_encoded:
            messages = self.with_tensors(request, self.gradients)
            for message in messages if coded is not None and not self.is_beside else ():
                message.flags |= UNCODED
            return messages
        if self.is_beside:
            return [request(tensor_bytes=coded.num_bytes)]
        messages = []
        for index in range(len(self.gradients)):
            payload = coded.frames(index) if self.carries_bytes else ()
            message = request(shard=index, tensor_bytes=coded.shard_bytes(index), payload=payload)
            message.body = {**message.body, **coded.body}
            messages.append(message)
        return messages

    def with_tensors(self, request: Request, tensors: Sequence[Sequence[Tensor]]) -> list[Message]:
        """Messages with the tensors of each shard; the first layers', which the next forward pass needs first, ahead.

        For a server beside, one message, which stands for them.
        """
        if self.is_beside:
            return [request(tensor_bytes=self.range_bytes)]
        return [
            request(shard=index, tensor_bytes=num_bytes, payload=to_frames(some) if self.carries_bytes else ())
            for index, (some, num_bytes) in enumerate(zip(tensors, self.shard_bytes, strict=True))
        ]
