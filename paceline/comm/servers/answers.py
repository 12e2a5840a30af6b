"""How a server's answers go out to workers on other hosts: at once, or in turn where a worker beside it needs that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from paceline.comm.servers.answer_window import LEAST_ANSWERS, AnswerWindow
from paceline.comm.wire import FRAME_BYTES, IN_TURN, Message


@final
class AnswersElsewhere:
    """In turn where a worker beside this server has to push over a busier link than workers of some other hosts.

    Args:
        send: an answer to a worker.
    """

    def __init__(self, send: Callable[[int, Message], None]) -> None:
        self._send = send
        self._window: AnswerWindow[Message] = AnswerWindow(time.monotonic, least_bytes=LEAST_ANSWERS * FRAME_BYTES)
        self.are_in_turn = False
        """Whether workers say that answers have come, where these go in turn."""
        self.has_neighbour = False
        """Whether a worker is on this host."""
        self.some_are_apart = False
        """Whether a worker is on a host without any server."""

    def send(self, worker: int, message: Message) -> None:
        """Now, or when earlier answers have come."""
        if self.are_in_turn and self.has_neighbour and self.some_are_apart:
            message.flags |= IN_TURN
            self._window.put(worker, message, sum(len(frame) for frame in message.payload))
            self._send_next()
        else:
            self._send(worker, message)

    def received(self, worker: int) -> bool:
        """This worker says that it has one of those in turn; false, and nothing changes, where it was sent none."""
        if not self._window.answered(worker):
            return False
        self._send_next()
        return True

    def _send_next(self) -> None:
        """What may go now."""
        for worker, message in self._window.take():
            self._send(worker, message)
