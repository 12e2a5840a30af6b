"""Messages from one rank to another through shared memory: a channel of a few slots for every pair of ranks."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    way: "_Way"
    finish: Callable[[], None] | None = None
    """What is to be done once when the last piece has moved."""

    def obstacle(self) -> Obstacle:
        return Obstacle(self.way.awaited, self.way.next_needed(), self.signature)


@final
class _Box:
    """What one rank writes for one other."""

    def __init__(self, block: SharedBlock, number: int) -> None:
        start = number * BOX_BYTES
        signatures = start + _SIGNATURES_START
        self.words = block.buffer[start:signatures].cast("I")
        self.signatures = [
            block.buffer[signatures + slot * _SIGNATURE_STRIDE :][:SIGNATURE_BYTES] for slot in range(_NUM_SLOTS)
        ]
        self.slots = pieces(block.tensor[start + _HEADER_BYTES : start + BOX_BYTES], PIECE_BYTES)


@final
@dataclass(eq=False)
class _Way:
    """The messages from this rank to one other, or from that one to this, in the order of the calls."""

    rank: int
    """The other rank."""
    box: _Box
    """Through which the messages go: the sender's."""
    progress: Counter
    """How many pieces this rank has moved."""
    awaited: Counter
    """How many the other has."""
    lead: int
    """By how many pieces the other must be ahead before this rank moves the next."""
    moved: int = FIRST_NUMBER
    messages: deque[_Message] = field(default_factory=deque)

    def next_needed(self) -> int:
        """How far the other must have come before the next piece can move."""
        return self.moved + self.lead

    def can_move(self) -> bool:
        return bool(self.messages) and self.awaited.reached(self.next_needed())


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
        self._outgoing: dict[int, _Way] = {}
        self._incoming: dict[int, _Way] = {}
        rank = rendezvous.rank
        for other in rendezvous.peers:
            mine, theirs = _Box(blocks[rank], other), _Box(blocks[other], rank)
            sent, received = (Counter(word, mine.words, {other: theirs.words}) for word in (_SENT, _RECEIVED))
            # A sender fills the slots ahead of the receiver; a receiver needs one piece more than it has.
            self._outgoing[other] = _Way(other, mine, progress=sent, awaited=received, lead=1 - _NUM_SLOTS)
            self._incoming[other] = _Way(other, theirs, progress=received, awaited=sent, lead=1)

    @staticmethod
    def prepare(block: SharedBlock, size: int) -> None:
        """Set the words of all boxes before anyone sees them."""
        for other in range(size):
            words = _Box(block, other).words
            Counter.prepare(_SENT, words)
            Counter.prepare(_RECEIVED, words)

    def send(self, raw: Tensor, destination: int, signature: Signature) -> Work:
        """Start to send the 1-D uint8 tensor; never blocks."""
        self._rendezvous.check()
        return self._start(self._outgoing[destination], raw, signature)

    def recv(self, raw: Tensor, source: int, signature: Signature, finish: Callable[[], None] | None) -> Work:
        """Start to fill the 1-D uint8 tensor, after those that wait for the same source; never blocks."""
        self._rendezvous.check()
        return self._start(self._incoming[source], raw, signature, finish)

    def wait(self, message: _Message) -> None:
        started_s = time.perf_counter()
        while message.pieces:
            self._rendezvous.check()
            self.advance()
            if message.pieces:
                interval_s = MIXED_INTERVAL_S if self._pipeline.advance() else LOOK_INTERVAL_S
                obstacle = message.obstacle()
                if message.way is self._incoming[message.way.rank]:
                    self._rendezvous.require_moving(obstacle, message.way.rank, issued=self._pipeline.issued)
                self._rendezvous.wait_for_event(obstacle, started_s, ready=self._can_advance, interval_s=interval_s)

    def poll(self, message: _Message) -> bool:
        """Advance without blocking; whether `message` is over."""
        if message.pieces:
            self._rendezvous.check()
            self.advance()
        if message.pieces:
            self._rendezvous.look(message.obstacle())
        return not message.pieces

    def advance(self) -> bool:
        """Put into the boxes what they have room for and take out what is awaited; whether any message is left."""
        is_any_left = False
        for other, outgoing in self._outgoing.items():
            if outgoing.messages:
                self._move(outgoing, self._put)
            incoming = self._incoming[other]
            if incoming.messages:
                self._move(incoming, self._take)
            is_any_left = is_any_left or bool(outgoing.messages or incoming.messages)
        return is_any_left

    def close(self) -> None:
        self._outgoing, self._incoming = {}, {}

    def _start(self, way: _Way, raw: Tensor, signature: Signature, finish: Callable[[], None] | None = None) -> Work:
        message = _Message(signature, deque(pieces(raw, PIECE_BYTES)), way, finish)
        way.messages.append(message)
        self.advance()
        return OwnedWork(self, message)

    def _move(self, way: _Way, move_piece: Callable[[_Way, _Message, int], None]) -> None:
        before_s = time.perf_counter()
        while way.can_move():
            message = way.messages[0]
            number = way.moved + 1
            move_piece(way, message, number % _NUM_SLOTS)
            way.moved = number
            way.progress.set(number)
            self._rendezvous.ring(way.rank)
            self._timing.moved_bytes += message.pieces[0].numel()
            if len(message.pieces) == 1:
                way.messages.popleft()
                if message.finish is not None:
                    message.finish()
            message.pieces.popleft()  # last: without pieces the message counts as over
        self._timing.communication_s += time.perf_counter() - before_s

    def _put(self, way: _Way, message: _Message, slot: int) -> None:
        piece = message.pieces[0]
        way.box.signatures[slot][:] = message.signature.raw
        way.box.slots[slot][: piece.numel()].copy_(piece)

    def _take(self, way: _Way, message: _Message, slot: int) -> None:
        piece, theirs = message.pieces[0], bytes(way.box.signatures[slot])
        if theirs != message.signature.raw:
            self._rendezvous.fail(
                TensorMismatch(
                    f"rank {self._rendezvous.rank} receives {message.signature} but rank {way.rank} sends "
                    f"{Signature.unpack(theirs)}; both must agree"
                )
            )
        piece.copy_(way.box.slots[slot][: piece.numel()])

    def _can_advance(self) -> bool:
        return any(way.can_move() for way in (*self._outgoing.values(), *self._incoming.values()))
