"""What the server knows of a client, and of its turn in a round."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class Said(NamedTuple):
    """Something for the server's log."""

    client: int | None
    text: str


class Arrival(NamedTuple):
    """A whole update, not looked at yet."""

    client: int
    content: bytearray
    weight: float
    scale: float


@dataclass
class Client:
    route: bytes | None = None
    """How to reach the process that has the ticket."""
    heard_s: float = 0.0
    samples: int = 0
    is_attached: bool = False
    num_refused: int = 0
    counted: int = -1
    """The last round in which an update of its counted."""
    displaced: deque[bytes] = field(default_factory=lambda: deque(maxlen=8))
    """Processes that had the ticket before another one came with it."""


@dataclass
class Turn:
    weight: float
    content: bytearray = field(default_factory=bytearray)
    scale: float = 1.0
    state: str = "open"
    """Then `arrived`, and in the end `done`, `refused`, `nothing` or `gone`."""
