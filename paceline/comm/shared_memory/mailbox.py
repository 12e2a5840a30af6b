"""Messages from one rank to another through shared memory: a channel of a few slots for every pair of ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from paceline.comm.arguments import pieces
from paceline.comm.base import Timing, Work
from paceline.comm.shared_memory.block import SharedBlock
from paceline.comm.shared_memory.pipeline import MIXED_INTERVAL_S, Pipeline
from paceline.comm.shared_memory.rendezvous import FIRST_NUMBER, LOOK_INTERVAL_S, Counter, Obstacle, Rendezvous
from paceline.comm.signature import SIGNATURE_BYTES, Signature
from paceline.comm.works import OwnedWork
from paceline.errors import TensorMismatch

# Rank a alone writes the box for rank b in its block: two words, then a signature a slot, then the slots.
_SENT, _RECEIVED = 0, 1
_SIGNATURES_START = 64
_SIGNATURE_STRIDE = 32
_HEADER_BYTES = 4096
_NUM_SLOTS = 2
PIECE_BYTES = 2**18
BOX_BYTES = _HEADER_BYTES + _NUM_SLOTS * PIECE_BYTES


@dataclass(eq=False)
class _Message:
    """What this rank has still to send to another, or to receive from it; over when no piece is left."""

    signature: Signature
    pieces: deque[Tensor]
    awaited: Callable[[], tuple[Counter, int]]
    """Which counter of the other rank must come how far before the message can go on."""
    finish: Callable[[], None] | None = None
    """What is to be done once when the last piece has moved."""

    def obstacle(self) -> Obstacle:
        return Obstacle(*self.awaited(), self.signature)


@final
class _Box:
    """One rank's side of a channel, as either of the two sees it."""

    def __init__(self, block: SharedBlock, start: int) -> None:
        self.words = block.buffer[start : start + _SIGNATURES_START].cast("I")
        self.signatures = [
            block.buffer[first : first + SIGNATURE_BYTES]
            for first in range(
                start + _SIGNATURES_START, start + _SIGNATURES_START + _NUM_SLOTS * _SIGNATURE_STRIDE, _SIGNATURE_STRIDE
            )
        ]
        slots_start = start + _HEADER_BYTES
        self.slots = pieces(block.tensor[slots_start : start + BOX_BYTES], PIECE_BYTES)


@final
class _Channel:
    """Both directions between this rank and one other."""

    def __init__(self, rank: int, mine: _Box, theirs: _Box) -> None:
        """`mine`: this rank's box for `rank`; `theirs`: that rank's box for this one."""
        self.rank = rank
        self.outgoing: deque[_Message] = deque()
        self.incoming: deque[_Message] = deque()
        self.num_sent = FIRST_NUMBER
        self.num_received = FIRST_NUMBER
        self.sent = Counter(_SENT, mine.words, {rank: theirs.words})
        self.received = Counter(_RECEIVED, mine.words, {rank: theirs.words})
        self._mine = mine
        self._theirs = theirs

    def room(self) -> tuple[Counter, int]:
        """The piece that the other must have received before the next one finds a free slot."""
        return self.received, self.num_sent + 1 - _NUM_SLOTS

    def mail(self) -> tuple[Counter, int]:
        """The piece that the other must have sent before the next one can be taken."""
        return self.sent, self.num_received + 1

    def can_put(self) -> bool:
        counter, number = self.room()
        return bool(self.outgoing) and counter.reached(number)

    def can_take(self) -> bool:
        counter, number = self.mail()
        return bool(self.incoming) and counter.reached(number)

    def put(self, piece: Tensor, signature: Signature) -> None:
        self.num_sent += 1
        slot = self.num_sent % _NUM_SLOTS
        self._mine.signatures[slot][:] = signature.raw
        self._mine.slots[slot][: piece.numel()].copy_(piece)
        self.sent.set(self.num_sent)

    def next_signature(self) -> bytes:
        return bytes(self._theirs.signatures[(self.num_received + 1) % _NUM_SLOTS])

    def take(self, piece: Tensor) -> None:
        self.num_received += 1
        piece.copy_(self._theirs.slots[self.num_received % _NUM_SLOTS][: piece.numel()])
        self.received.set(self.num_received)


@final
class Mailbox:
    """One rank's channels to all others. Messages advance whenever this rank calls anything that waits."""

    def __init__(
        self, rendezvous: Rendezvous, pipeline: Pipeline, blocks: Sequence[SharedBlock], timing: Timing
    ) -> None:
        """`blocks`: of all ranks, in rank order; in each, one box for every rank."""
        self._rendezvous = rendezvous
        self._pipeline = pipeline
        self._timing = timing
        rank = rendezvous.rank
        self._channels = {
            other: _Channel(other, _Box(blocks[rank], other * BOX_BYTES), _Box(blocks[other], rank * BOX_BYTES))
            for other in range(len(blocks))
            if other != rank
        }

    @staticmethod
    def prepare(block: SharedBlock, size: int) -> None:
        """Set the words of all boxes before anyone sees them."""
        for other in range(size):
            words = _Box(block, other * BOX_BYTES).words
            Counter.prepare(_SENT, words)
            Counter.prepare(_RECEIVED, words)

    def send(self, raw: Tensor, destination: int, signature: Signature) -> Work:
        """Start to send the 1-D uint8 tensor; never blocks."""
        channel = self._channel(destination)
        message = _Message(signature, deque(pieces(raw, PIECE_BYTES)), channel.room)
        return self._start(message, channel.outgoing)

    def recv(self, raw: Tensor, source: int, signature: Signature, finish: Callable[[], None] | None) -> Work:
        """Start to fill the 1-D uint8 tensor, after those that wait for the same source; never blocks."""
        channel = self._channel(source)
        message = _Message(signature, deque(pieces(raw, PIECE_BYTES)), channel.mail, finish)
        return self._start(message, channel.incoming)

    def wait(self, message: _Message) -> None:
        """Block until `message` is over."""
        started_s = time.perf_counter()
        while message.pieces:
            self._rendezvous.check()
            self.advance()
            if message.pieces:
                interval_s = MIXED_INTERVAL_S if self._pipeline.advance() else LOOK_INTERVAL_S
                self._rendezvous.wait_for_event(
                    message.obstacle(), started_s, ready=self._can_advance, interval_s=interval_s
                )

    def poll(self, message: _Message) -> bool:
        """Advance without blocking; whether `message` is over."""
        if message.pieces:
            self._rendezvous.check()
            self.advance()
        if message.pieces:
            self._rendezvous.look(message.obstacle())
        return not message.pieces

    def advance(self) -> bool:
        """Put into the channels what they have room for and take out what is awaited; whether any message is left."""
        is_any_left = False
        for channel in self._channels.values():
            if channel.outgoing:
                self._put(channel)
            if channel.incoming:
                self._take(channel)
            is_any_left = is_any_left or bool(channel.outgoing or channel.incoming)
        return is_any_left

    def close(self) -> None:
        """Forget all messages and let go of the memory."""
        self._channels = {}

    def _channel(self, rank: int) -> _Channel:
        self._rendezvous.check()
        return self._channels[rank]

    def _start(self, message: _Message, messages: deque[_Message]) -> Work:
        messages.append(message)
        self.advance()
        return OwnedWork(self, message)

    def _put(self, channel: _Channel) -> None:
        before_s = time.perf_counter()
        while channel.can_put():
            message = channel.outgoing[0]
            channel.put(message.pieces[0], message.signature)
            self._moved(channel, channel.outgoing)
        self._timing.communication_s += time.perf_counter() - before_s

    def _take(self, channel: _Channel) -> None:
        before_s = time.perf_counter()
        while channel.can_take():
            message = channel.incoming[0]
            self._require_agreement(channel, message.signature)
            channel.take(message.pieces[0])
            self._moved(channel, channel.incoming)
        self._timing.communication_s += time.perf_counter() - before_s

    def _moved(self, channel: _Channel, messages: deque[_Message]) -> None:
        """The first piece of the first message is through."""
        message = messages[0]
        self._rendezvous.ring(channel.rank)
        self._timing.moved_bytes += message.pieces[0].numel()
        if len(message.pieces) == 1:
            messages.popleft()
            if message.finish is not None:
                message.finish()
        # Last: without pieces the message counts as over.
        message.pieces.popleft()

    def _require_agreement(self, channel: _Channel, signature: Signature) -> None:
        theirs = channel.next_signature()
        if theirs != signature.raw:
            self._rendezvous.fail(
                TensorMismatch(
                    f"rank {self._rendezvous.rank} receives {signature} but rank {channel.rank} sends "
                    f"{Signature.unpack(theirs)}; both must agree"
                )
            )

    def _can_advance(self) -> bool:
        return any(channel.can_put() or channel.can_take() for channel in self._channels.values())
