"""How one worker's messages reach the servers, whatever they are about."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from paceline.layout import Layout
from paceline.server.actions import Send
from paceline.server.client_core import ClientCore
from paceline.server.conversation import Conversation
from paceline.server.spec import OptimizerSpec, Push, Reply


class Turn(NamedTuple):
    """What came of an exchange without a message."""

    reply: Reply
    elapsed_s: float
    waiting_s: float


class Carrier(ABC):
    """How one worker's messages reach the servers, real or simulated."""

    beside: Sequence[bool]
    """For each server, in the order of their key ranges, whether it is on this worker's host."""
    epochs: Sequence[int] | None = None
    """Each server's epoch, which messages to it and from it carry; none: they carry the membership's."""
    is_all_beside: bool = False
    """All servers are on this worker's host, and none takes another's place: rows that lie in their memory can be read
    there."""
    takes_rows_along: bool = False
    """Gradients of rows go with the push that they belong to. On one host that saves a message. Where servers are
    copied, those that went apart would be lost with the server that had them."""
    reads_ahead: bool = True
    """A server that was read ahead from is still there for the later request."""
    standing: Callable[[], str | None] | None = None
    """Calls `Collective.standing`; set while this worker waits until all have pushed."""
    carries_bytes: bool
    """Tensors for servers elsewhere pass as bytes; else servers reach this worker's memory."""

    def begin(self, client: ClientCore) -> None:
        """Carry this conversation on where another server takes over."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """A zeroed uint8 tensor in memory that servers beside reach without a copy."""

    @abstractmethod
    def bodies(self, parameters: Tensor, gradients: Tensor) -> Sequence[Mapping[str, Any]]:
        """How each server finds these buffers, which were allocated here."""

    @abstractmethod
    def attached(
        self, client: ClientCore, layout: Layout, spec: OptimizerSpec, said: Sequence[Mapping[str, Any]]
    ) -> None:
        """What each server said of itself."""

    def serve_itself(self, client: ClientCore, push: Push) -> Turn | None:
        """Push without a message, if the server lets workers do so now. The push must be plain."""
        return None

    @abstractmethod
    def carry(self, client: Conversation, sends: Iterable[Send]) -> float:
        """Send these and what follows from their answers, until all that is due has come; returns how many seconds that
        took. Raises DeadlineExceeded, which names the servers and what was asked, or Aborted."""

    @abstractmethod
    def set_off(self, conversation: Conversation, sends: Iterable[Send]) -> None:
        """Send these, which read rows ahead, and go on. Answers wait until this or another conversation is carried on;
        one of this kind is under way at a time."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every present and future wait with `Aborted(reason)`; callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and sockets; a second call does nothing."""
