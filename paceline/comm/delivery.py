"""Two ends of a connection get each other's messages once and in order, whenever the connection breaks.

Sans-IO. Before a message's first bytes an envelope says its number, and how many of the other end's have arrived. An
end keeps what it has sent until the other one says that it is there. When the connection was broken and is made anew,
the caller asks to begin again: both say what they have, and send the rest again. What comes twice or after a gap is
passed over.
"""

import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

from paceline.messages import Raw

_ENVELOPE = struct.Struct("<Qqq")
_WORD = 0  # in a number's place: it is none that counts. -1: begin again; -2: so, as it is asked the second time
_MOST_UNSAID, _MOST_UNSAID_BYTES = 16, 16 << 20
"""Who has received more, and has said nothing since, says so in a message of its own: the other end keeps it all."""


class Envelope(NamedTuple):
    life: int
    """A number that the caller draws: one that starts again under its name has another, and begins anew."""
    number: int
    heard: int
    """How many of the other end's messages have arrived here."""


def opened(frames: Sequence[Raw]) -> tuple[Envelope | None, list[Raw]]:
    """Take the envelope off what has come. There is none on what is no word of ours; a word without a message has no
    frames behind it."""
    first = memoryview(frames[0]) if frames else memoryview(b"")
    if len(first) < _ENVELOPE.size:
        return None, []
    envelope = Envelope(*_ENVELOPE.unpack_from(first))
    return envelope, [first[_ENVELOPE.size :], *frames[1:]] if len(first) > _ENVELOPE.size else []


class Heard(NamedTuple):
    is_new: bool
    """Whether the message is for whoever reads here."""
    say: Sequence[Sequence[Raw]]
    """Frames to be sent now."""


@final
class Delivery:
    """One end.

    Args:
        calls: this is the end that makes the connection, and makes it anew.
    """

    def __init__(self, life: int, *, calls: bool) -> None:
        self.life, self._calls = life, calls
        self._num_sent = self._num_heard = self._num_asked = 0
        self._kept: deque[tuple[int, Sequence[Raw]]] = deque()
        self._num_unsaid = self._unsaid_bytes = 0
        self.is_asking = False
        """Whether the other end has yet to say what it has: what is sent meanwhile waits for that."""

    @property
    def is_settled(self) -> bool:
        """Whether all that was sent is known to be there."""
        return not self._kept

    def send(self, frames: Sequence[Raw], *, keep: bool = True) -> Sequence[Raw]:
        """Give the frames to send for a message; none where they wait for the other end. `keep`: the message has to
        arrive, and the caller leaves its memory as it is until it has. Otherwise it may be lost."""
        if not keep:
            return self._enclosed(_WORD, frames)
        self._num_sent += 1
        self._kept.append((self._num_sent, frames))
        return () if self.is_asking else self._enclosed(self._num_sent, frames)

    def keep_nothing(self) -> None:
        """Nothing that was sent has to arrive any more, nor what is sent from now on."""
        self._kept = deque(maxlen=0)

    def ask(self) -> Sequence[Raw]:
        """The caller's connection was broken, or it wants to know what has arrived: what is to be sent."""
        self.is_asking = True
        self._num_asked += 1
        return [self._envelope(-self._num_asked)]

    def hear(self, envelope: Envelope, frames: Sequence[Raw]) -> Heard:
        """Something has come."""
        while self._kept and self._kept[0][0] <= envelope.heard:
            self._kept.popleft()
        if envelope.number < 0:
            return Heard(False, self._begun_again(envelope.number))
        if envelope.number == _WORD:
            return Heard(bool(frames), ())
        is_new = envelope.number == self._num_heard + 1
        if is_new:
            self._num_heard += 1
            self._num_unsaid += 1
            self._unsaid_bytes += sum(map(len, frames))
        is_due = self._num_unsaid >= _MOST_UNSAID or self._unsaid_bytes >= _MOST_UNSAID_BYTES
        return Heard(is_new, [[self._envelope(_WORD)]] if is_due else ())

    def _begun_again(self, number: int) -> list[Sequence[Raw]]:
        if self._calls and number != -self._num_asked:
            return []  # answered on a connection that was broken since
        answer = [] if self._calls else [[self._envelope(number)]]
        self.is_asking = False
        return [*answer, *(self._enclosed(number, frames) for number, frames in self._kept)]

    def _enclosed(self, number: int, frames: Sequence[Raw]) -> list[Raw]:
        return [self._envelope(number) + frames[0], *frames[1:]]

    def _envelope(self, number: int) -> bytes:
        self._num_unsaid = self._unsaid_bytes = 0
        return _ENVELOPE.pack(self.life, number, self._num_heard)
