"""Messages that come unasked: a handler takes each one, whatever its worker is at."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from torch import Tensor

from paceline.comm.base import Timing

Handler = Callable[[int, Tensor], Iterable[tuple[int, Tensor]]]
"""Takes the sender's rank and a message; gives receivers and messages to send at once. It computes nothing long, and
waits for nothing: no socket, no clock, no thread, so that it is the same on every engine."""


class Mailbox(ABC):
    """One worker's. A message is a 1-D uint8 tensor on the CPU, and whoever has sent it leaves it alone.

    What one worker sends another arrives once, and in order. Every call raises what the handler has raised.

    Where workers come, leave and die, a mailbox is for those of one epoch of membership. When that ends (`has_ended`),
    the handler goes on, so that the living still have one another's answers; each then closes its mailbox and makes
    another. What was sent to the closed one does not come to the next.
    """

    timing: Timing

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether some are gone, or others join, so that those who are there are to meet anew."""

    @abstractmethod
    def open(self, handler: Handler) -> None:
        """Have `handler` take what comes, and what has come already, one message after the other."""

    @abstractmethod
    def turn(self) -> AbstractContextManager[None]:
        """While it lasts the handler takes nothing. What came before has been taken."""

    @abstractmethod
    def send(self, message: Tensor, *, destination: int) -> None:
        """Send a message, within a turn."""

    @abstractmethod
    def wait(self, is_over: Callable[[], bool], what: str, *, sender: int) -> None:
        """Within a turn, have the handler take what comes until it has made `is_over` true.

        Args:
            sender: who is to send that.

        Raises:
            PeerLost: the sender is gone.
            DeadlineExceeded: nothing came for too long; the message names `what`.
            Aborted: the run is ending.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every present and future wait with `Aborted(reason)`; callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Take nothing any more; give back sockets and threads. A second call does nothing."""
