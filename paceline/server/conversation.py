"""What a worker asks the servers, whatever it is about, and how it goes on where another server takes one's place."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from paceline.messages import Message
from paceline.server.actions import Send
from paceline.server.client_core import ClientCore


class Conversation(Protocol):
    """A worker's end of what it asks the servers, until all that is due has come."""

    what: str
    """It is about, in words."""

    @property
    def is_done(self) -> bool: ...

    @property
    def due(self) -> list[int]:
        """Servers that owe an answer."""

    def receive(self, index: int, answer: Message) -> Iterator[Send]:
        """A server's answer has come; what to send for it."""

    def ask_again(self, index: int) -> Iterable[Send]:
        """What to send a server that has just taken another's place, which may not have been asked what is due."""


def hear(store: ClientCore, conversation: Conversation, index: int, answer: Message) -> Iterator[Send]:
    """A server's answer has come. It is for the conversation, or, where the server has just taken another's place and
    the store has told it of this worker first, for the store. Yields what to send for it. Raises WireError where it
    does not want to know the worker.
    """
    if conversation is store or index not in store.new:
        yield from conversation.receive(index, answer)
        return
    yield from store.receive(index, answer)
    if index in store.new:
        store.require_done()
    yield from conversation.ask_again(index)
