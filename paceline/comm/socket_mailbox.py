"""A mailbox between processes: a thread beside the worker takes what comes over the run's encrypted sockets."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from paceline.comm.base import Collective, Timing
from paceline.comm.mailbox import Handler, Mailbox
from paceline.comm.wire import Caller, Keys, Listener
from paceline.errors import Aborted, DeadlineExceeded, PacelineError, PeerLost
from paceline.messages import Kind, Message, WireError, from_frames, to_frames

_LOOK_S = 0.1
"""How often the thread looks whether the mailbox was closed."""
_LINGER_S = 1.0
"""What was sent last has so long to leave."""


@final
class SocketMailbox(Mailbox):
    """Making one is a collective call: all workers tell one another where they listen.

    Args:
        keys: of the run.
        host: the address to listen on.
        collective: of the workers.
        epoch: membership epoch; messages of another one are refused.
        deadline_s: how long a wait may go on while nothing comes; none: for ever.
    """

    def __init__(self, keys: Keys, *, host: str, collective: Collective, epoch: int, deadline_s: float | None) -> None:
        self.timing = Timing()
        self._keys, self._rank, self._epoch, self._deadline_s = keys, collective.rank, epoch, deadline_s
        self._listener = Listener(keys, host=host)
        try:
            self._endpoints: list[str] = collective.all_gather_object(self._listener.endpoint)
        except BaseException:
            self._listener.close()
            raise
        self._callers: dict[int, Caller] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._has_ended = self._is_closed = False
        self._gone: frozenset[int] = frozenset()
        self._handler: Handler | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def end(self, gone: Iterable[int]) -> None:
        """The epoch is over, and nothing comes from these ranks any more. Callable from any thread."""
        with self._changed:
            self._has_ended, self._gone = True, self._gone.union(gone)
            self._changed.notify_all()

    def open(self, handler: Handler) -> None:
        self._handler = handler
        self._thread = threading.Thread(target=self._serve, name="mailbox", daemon=True)
        self._thread.start()

    @contextmanager
    def turn(self) -> Iterator[None]:
        began_s = time.perf_counter()
        with self._changed:
            self.timing.communication_s += time.perf_counter() - began_s
            self._require_going()
            yield

    def send(self, message: Tensor, *, destination: int) -> None:
        caller = self._callers.get(destination)
        if caller is None:
            endpoint = self._endpoints[destination]
            caller = self._callers[destination] = Caller(self._keys, endpoint=endpoint, identity=f"mail-{self._rank}")
        num_bytes = message.nbytes
        caller.send(Message(Kind.MAIL, self._epoch, self._rank, tensor_bytes=num_bytes, payload=to_frames([message])))
        self.timing.moved_bytes += num_bytes

    def wait(self, is_over: Callable[[], bool], what: str, *, sender: int) -> None:
        began_s = time.perf_counter()
        try:
            while not is_over():
                if sender in self._gone:
                    raise PeerLost(f"rank {self._rank}: {what} does not come: that rank is gone")
                came = self._changed.wait(self._deadline_s)
                self._require_going()
                if not came:
                    raise DeadlineExceeded(f"rank {self._rank}: {what} did not come within {self._deadline_s:g} s")
        finally:
            self.timing.communication_s += time.perf_counter() - began_s

    def abort(self, reason: str) -> None:
        self._fail(Aborted(f"rank {self._rank} takes no message any more: {reason}"))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        self._listener.close()
        for caller in self._callers.values():  # of an epoch that is over, all that the living wait for has come
            caller.close(linger_s=0.0 if self._has_ended else _LINGER_S)

    def _serve(self) -> None:
        """What the thread does."""
        try:
            while not self._is_closed:
                with self._changed:
                    for caller in self._callers.values():
                        caller.receive()  # word of what has arrived, which comes alone; or its connection is broken
                if self._listener.socket.poll(int(_LOOK_S * 1000)):
                    mail = self._listener.receive()
                    if mail is None:
                        continue
                    _, frames = mail
                    message = Message.decode(frames, epoch=self._epoch)
                    if message.kind is not Kind.MAIL or not 0 <= message.sender < len(self._endpoints):
                        raise WireError(f"refused a message of kind {message.kind.name} from {message.sender}")
                    content = torch.empty(sum(len(frame) for frame in message.payload), dtype=torch.uint8)
                    from_frames(message.payload, [content])
                    self._take(message.sender, content)
        except BaseException as error:
            self._fail(error)

    def _take(self, sender: int, content: Tensor) -> None:
        assert self._handler is not None
        with self._changed:
            for receiver, answer in self._handler(sender, content):
                self.send(answer, destination=receiver)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _require_going(self) -> None:
        if isinstance(self._failure, PacelineError):
            raise type(self._failure)(str(self._failure))
        if self._failure is not None:
            raise self._failure
