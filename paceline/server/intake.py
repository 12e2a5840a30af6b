"""How a server takes in what workers push: piece by piece, coded or not, with rows of tables, to count now or later."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from paceline.codec import TensorCodec
from paceline.elastic.lanes import Done
from paceline.messages import HOLD, STOP, UNCODED, VOID, Kind, Message, Raw, WireError, from_frames, split_frames
from paceline.server.actions import Action, Send
from paceline.server.admission import ProtocolError
from paceline.server.answering import Answering, Client
from paceline.server.coded_push import decode_push, push_coding_s
from paceline.server.part import Part
from paceline.server.spec import ServerSpec
from paceline.server.whole_pushes import WholePushes

_ABOUT = ("sender", "weight", "kind", "share")  # a contribution


@final
class Intake:
    """A part of `ServerCore`.

    Args:
        answering: has the shards, and answers whoever a push completes.
        pushes: where servers outlive workers, what counts, and what is held until it does.
    """

    def __init__(self, answering: Answering, pushes: WholePushes) -> None:
        self._answering, self._pushes = answering, pushes
        self._codec: TensorCodec | None = None
        self._outlives_workers = False

    def configure(self, spec: ServerSpec) -> None:
        self._codec, self._outlives_workers = spec.codec, spec.outlives_workers

    def exchange(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        """A worker pushes, all at once or a piece."""
        client.arrived_s = now_s
        parts = self._answering.parts_of(message)
        if "rows" in message.body:
            message = self._take_rows(client, message, parts)
        if client.parameters is None and not message.flags & VOID:
            for index, _ in parts:
                self._read(message, index, client.gradients[index])
        if self._outlives_workers and (not client.is_beside or message.flags & HOLD):
            if not self._pushes.has_all(message, num_shards=len(self._answering.parts)):
                return
            # A worker asks anew when another server has taken over, which may have counted it.
            if message.flags & HOLD and self._pushes.lacks(message):
                self._pushes.hold(message)
                yield Send(message.sender, self._answering.message(Kind.HELD))
                return
            parts = self._answering.numbered_parts
        yield from self.count(client, message, parts, now_s)

    def count_held(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        """A worker says that other servers have its push as well."""
        client.arrived_s = now_s
        if self._pushes.lacks(message):  # else the server before has counted it, and the push itself is answered
            push = self._pushes.held(message.sender, clock=message.clock)
            yield from self.count(client, push, self._answering.numbered_parts, now_s)

    def count(
        self, client: Client, message: Message, parts: Sequence[tuple[int, Part]], now_s: float
    ) -> Iterator[Action]:
        """Give these shards what has been pushed."""
        is_void, body = bool(message.flags & VOID), message.body
        about = {name: body[name] for name in _ABOUT if name in body} if body else {}
        groups = body.get("groups")
        if self._outlives_workers:
            self._pushes.count(message)
        for index, part in parts:
            answers = part.shard.push(
                message.sender,
                message.clock,
                None if is_void else client.gradients[index],
                pause_at=message.pause_at,
                stop=bool(message.flags & STOP),
                groups=part.own_groups(groups) if groups is not None else None,
                **about,
            )
            yield from self._answering.answer(index, part, answers, now_s)
        if "contributors" in body:
            yield from self.follow(client, message, now_s)

    def follow(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        """A worker brings what the first server decided."""
        clock, contributors = message.body.get("goes_on_at"), message.body.get("contributors")
        if type(clock) is not int or not isinstance(contributors, list | tuple):
            raise WireError(f"refused {contributors!r} as those whose gradients formed the clock before {clock!r}")
        if not any(part.shard.follows for part in self._answering.parts):
            raise ProtocolError(f"worker {message.sender} brings a decision to a server that decides for itself")
        return self._answering.tell_followers(message.sender, clock, contributors, now_s)

    def served_themselves(self, counted: Mapping[int, tuple[int, Done]]) -> None:
        """Workers have updated the shards, which are this server's again.

        Args:
            counted: for each worker that has pushed, the clock of its last gradient that counts here, and what it had
                done then.
        """
        if not self._outlives_workers:
            return
        for worker, (clock, done) in counted.items():
            body = {"done": list(done)}
            self._pushes.count(Message(Kind.EXCHANGE, self._answering.epoch, sender=worker, clock=clock, body=body))
            for part in self._answering.parts:
                part.shard.counted(worker, clock)

    def held_push(self, worker: int) -> tuple[Message, list[Tensor]]:
        """The worker's push that is held, without its tensors; and these."""
        gradients = self._answering.clients[worker].gradients
        return self._pushes.holds(worker), [tensor for shard in gradients for tensor in shard]

    def copy_held(self, push: Message, frames: Sequence[Raw]) -> None:
        """Another copy of this key range holds this push, with tensors in frames if there are any."""
        client = self._answering.clients[push.sender]
        if frames and not client.is_beside:
            from_frames(frames, [tensor for shard in client.gradients for tensor in shard])
        self._pushes.hold(push)

    def decode_s(self, push: Message, *, operation_s: float) -> float:
        """How long a core decodes what a worker pushes from elsewhere, where time is simulated and each operation takes
        so long besides its bytes."""
        codec = self._codec_of(push)
        if codec is None or not push.tensor_bytes:
            return 0.0
        parts = [part for _, part in self._answering.parts_of(push)]
        num_bytes, num_tensors = sum(part.tensor_bytes for part in parts), sum(len(part.pieces) for part in parts)
        return push_coding_s(codec, num_bytes, num_tensors=num_tensors, operation_s=operation_s)[1]

    def _take_rows(self, client: Client, message: Message, parts: Sequence[tuple[int, Part]]) -> Message:
        """A push has gradients of rows behind those of the model. Have the tables take them, and return the rest."""
        is_here = client.parameters is not None or message.flags & VOID
        own, rows = split_frames(message.payload, 0 if is_here else sum(part.tensor_bytes for _, part in parts))
        self._answering.tables.receive_push(replace(message, payload=rows))
        return replace(message, payload=own)

    def _read(self, push: Message, index: int, gradients: Sequence[Tensor]) -> None:
        codec = self._codec_of(push)
        if codec is None:
            from_frames(push.payload, gradients)
        else:
            decode_push(codec, push, gradients, server=self._answering.index, shard=index)

    def _codec_of(self, push: Message) -> TensorCodec | None:
        """The codec that the push has come through, if any."""
        return None if push.flags & UNCODED else self._codec
