"""Sending from one rank to another through shared memory: a channel of a few slots for every pair of ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from paceline.comm.arguments import pieces
from paceline.comm.base import Timing, Work
from paceline.comm.segment import Segment
from paceline.comm.shared_memory_pipeline import MIXED_INTERVAL_S, Pipeline
from paceline.comm.shared_memory_rendezvous import FIRST_NUMBER, LOOK_INTERVAL_S, Counter, Rendezvous
from paceline.comm.signature import SIGNATURE_BYTES, Signature
from paceline.errors import TensorMismatch

# A box in rank a's segment, meant for rank b, is written by a alone: two words, then a signature a slot, then slots.
_SENT, _RECEIVED = 0, 1
_SIGNATURES_START = 64
_SIGNATURE_STRIDE = 32
_HEADER_BYTES = 4096
_NUM_SLOTS = 2
PIECE_BYTES = 2**18
BOX_BYTES = _HEADER_BYTES + _NUM_SLOTS * PIECE_BYTES


@dataclass
class _Message:
    signature: Signature
    pieces: deque[Tensor]


@final
class _Box:
    """One rank's side of a channel, as either of the two sees it."""

    def __init__(self, segment: Segment, start: int) -> None:
        self.words = segment.buffer[start : start + _SIGNATURES_START].cast("I")
        self.signatures = [
            segment.buffer[first : first + SIGNATURE_BYTES]
            for first in range(
                start + _SIGNATURES_START, start + _SIGNATURES_START + _NUM_SLOTS * _SIGNATURE_STRIDE, _SIGNATURE_STRIDE
            )
        ]
        slots_start = start + _HEADER_BYTES
        self.slots = pieces(segment.tensor[slots_start : start + BOX_BYTES], PIECE_BYTES)


@final
class _Channel:
    """Both directions between this rank and one other."""

    def __init__(self, rank: int, mine: _Box, theirs: _Box) -> None:
        """`mine`: this rank's box for `rank`; `theirs`: that rank's box for this one."""
        self.rank = rank
        self.outgoing: deque[_Message] = deque()
        self.num_sent = FIRST_NUMBER
        self.num_received = FIRST_NUMBER
        self.sent = Counter(_SENT, mine.words, {rank: theirs.words})
        self.received = Counter(_RECEIVED, mine.words, {rank: theirs.words})
        self._mine = mine
        self._theirs = theirs

    def room_number(self) -> int:
        """The piece that the other must have received before the next one finds a free slot."""
        return self.num_sent + 1 - _NUM_SLOTS

    def has_room(self) -> bool:
        return self.received.reached(self.room_number())

    def has_mail(self) -> bool:
        return self.sent.reached(self.num_received + 1)

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
    """One rank's channels to all others. Sends advance whenever this rank calls anything that waits."""

    def __init__(self, rendezvous: Rendezvous, pipeline: Pipeline, segments: Sequence[Segment], timing: Timing) -> None:
        """`segments`: of all ranks, in rank order; in each, one box for every rank."""
        self._rendezvous = rendezvous
        self._pipeline = pipeline
        self._timing = timing
        rank = rendezvous.rank
        self._channels = {
            other: _Channel(other, _Box(segments[rank], other * BOX_BYTES), _Box(segments[other], rank * BOX_BYTES))
            for other in range(len(segments))
            if other != rank
        }

    @staticmethod
    def prepare(segment: Segment, size: int) -> None:
        """Set the words of all boxes before anyone sees them."""
        for other in range(size):
            words = _Box(segment, other * BOX_BYTES).words
            Counter.prepare(_SENT, words)
            Counter.prepare(_RECEIVED, words)

    def send(self, raw: Tensor, destination: int, signature: Signature) -> Work:
        """Start to send the 1-D uint8 tensor; never blocks."""
        self._rendezvous.check()
        channel = self._channels[destination]
        message = _Message(signature, deque(pieces(raw, PIECE_BYTES)))
        channel.outgoing.append(message)
        self.advance()
        return _Sending(self, channel, message)

    def recv(self, raw: Tensor, source: int, signature: Signature) -> None:
        """Block until the 1-D uint8 tensor is filled."""
        self._rendezvous.check()
        channel = self._channels[source]
        started_s = time.perf_counter()
        for piece in pieces(raw, PIECE_BYTES):
            while not channel.has_mail():
                self._await(channel.sent, channel.num_received + 1, signature, started_s, channel.has_mail)
            self._take(channel, piece, signature)

    def wait(self, channel: _Channel, message: _Message) -> None:
        """Block until all of `message` is in the channel."""
        started_s = time.perf_counter()
        while message.pieces:
            self._await(channel.received, channel.room_number(), message.signature, started_s, channel.has_room)

    def poll(self, channel: _Channel, message: _Message) -> bool:
        """Advance without blocking; whether all of `message` is in the channel."""
        if not message.pieces:
            return True
        self._rendezvous.check()
        self.advance()
        if message.pieces:
            self._rendezvous.look(channel.received, channel.room_number(), message.signature)
        return not message.pieces

    def advance(self) -> bool:
        """Put into the channels what they have room for; whether anything is left to send."""
        unsent = False
        for channel in self._channels.values():
            if channel.outgoing:
                self._put(channel)
                unsent = unsent or bool(channel.outgoing)
        return unsent

    def close(self) -> None:
        """Forget all messages and let go of the memory."""
        self._channels = {}

    def _put(self, channel: _Channel) -> None:
        before_s = time.perf_counter()
        while channel.outgoing and channel.has_room():
            message = channel.outgoing[0]
            piece = message.pieces[0]
            channel.put(piece, message.signature)
            self._rendezvous.ring(channel.rank)
            self._timing.moved_bytes += piece.numel()
            # Last, so that nobody takes the message for sent before it is.
            message.pieces.popleft()
            if not message.pieces:
                channel.outgoing.popleft()
        self._timing.communication_s += time.perf_counter() - before_s

    def _take(self, channel: _Channel, piece: Tensor, signature: Signature) -> None:
        before_s = time.perf_counter()
        theirs = channel.next_signature()
        if theirs != signature.raw:
            self._rendezvous.fail(
                TensorMismatch(
                    f"rank {self._rendezvous.rank} receives {signature} but rank {channel.rank} sends "
                    f"{Signature.unpack(theirs)}; both must agree"
                )
            )
        channel.take(piece)
        self._rendezvous.ring(channel.rank)
        self._timing.moved_bytes += piece.numel()
        self._timing.communication_s += time.perf_counter() - before_s

    def _await(
        self, counter: Counter, number: int, signature: Signature, started_s: float, arrived: Callable[[], bool]
    ) -> None:
        """Advance all other work; if `arrived` still does not hold, sleep until this rank's bell rings."""
        self._rendezvous.check()
        self.advance()
        interval_s = MIXED_INTERVAL_S if self._pipeline.advance() else LOOK_INTERVAL_S
        self._rendezvous.wait_for_event(
            counter,
            number,
            signature,
            started_s,
            ready=lambda: arrived() or self._can_put(),
            interval_s=interval_s,
        )

    def _can_put(self) -> bool:
        return any(channel.outgoing and channel.has_room() for channel in self._channels.values())


@final
class _Sending(Work):
    def __init__(self, mailbox: Mailbox, channel: _Channel, message: _Message) -> None:
        self._mailbox = mailbox
        self._channel = channel
        self._message = message

    def poll(self) -> bool:
        return self._mailbox.poll(self._channel, self._message)

    def wait(self) -> None:
        self._mailbox.wait(self._channel, self._message)
