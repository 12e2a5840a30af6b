"""What a worker's program sees of a store."""

import math
import operator
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, final

import torch
import zmq
from torch import Tensor

from paceline.comm.wire import AGAIN_S, Caller, Keys
from paceline.errors import DeadlineExceeded, PacelineError, UsageError
from paceline.kv.client_core import ClientCore
from paceline.kv.filters import Filter
from paceline.kv.range_clocks import RangeClock
from paceline.kv.requests import EPOCH
from paceline.kv.spec import MOST_KEYS, Pairs, Spec
from paceline.messages import Kind, Message

KeysLike = Tensor | range | Sequence[int]
_LINGER_S = 1.0


def identity_of(worker: int) -> str:
    return f"kv-{worker}"


@final
class Store:
    """A worker's connection to a store's servers; `Group.connect` makes it. For one thread.

    Requests go out at once, with copies of keys and values, and are answered in their own time: each gives a timestamp
    to wait for. An error of one is raised by the next call that waits, for whichever request; at the latest by `close`.
    """

    def __init__(
        self, spec: Spec, keys: Keys, endpoints: Sequence[str], *, worker: int, deadline_s: float | None
    ) -> None:
        self.worker, self._deadline_s = worker, deadline_s
        self._core = ClientCore(spec, worker)
        self._callers = [Caller(keys, endpoint=endpoint, identity=identity_of(worker)) for endpoint in endpoints]
        self._refusals: list[PacelineError] = []
        self._heard: set[int] = set()
        self._poller = zmq.Poller()
        for socket in (socket for caller in self._callers for socket in caller.sockets):
            self._poller.register(socket, zmq.POLLIN)
        self.sent_bytes = self.received_bytes = 0
        """Bytes of all messages so far: headers, keys and values."""

    def push(
        self,
        keys: KeysLike,
        values: Tensor,
        *,
        function: str = "add",
        within: range | None = None,
        after: Iterable[int] = (),
        filters: Iterable[Filter] = (),
    ) -> int:
        """Send values, to be joined with what servers hold. Returns a timestamp.

        Each push is this worker's contribution of its next clock, to every server: those of several workers that the
        rule joins are added up before the function is called.

        Args:
            keys: ascending, none twice; int64 of shape (keys,), or a range, of which no keys are sent.
            values: shape (keys, dim), or (keys,) where dim is 1.
            function: its name in the spec, or `add` or `assign`.
            within: the push is all that this clock has for these keys; by default the range that was given, or all.
            after: timestamps of earlier requests that are to be finished first, on each server that they concern.
            filters: what may be left out, one after the other.

        Raises:
            UsageError: keys or values do not fit the store, no request has a timestamp of `after`, or this worker has
                closed the store; as other requests do.
        """
        if filters := tuple(filters):
            fitting, some, within = self._core.checked(_plain(keys), values, within)
            assert some is not None
            pairs = Pairs(as_tensor(fitting), some)
            for each in filters:
                pairs = each(pairs)
            keys, values = pairs
        return self._ask(Kind.PUSH_VALUES, _plain(keys), values, function=function, within=within, after=tuple(after))

    def pull(self, keys: KeysLike, *, after: Iterable[int] = (), clock: int = 0) -> int:
        """Ask for values, once the rule lets this worker go on. Returns a timestamp, for `result`.

        Args:
            keys: as in `push`; a range asks for those of its keys that hold something.
            clock: wait until as many pushes of every worker have come to the range of these keys.
        """
        return self._ask(Kind.PULL_VALUES, _plain(keys), after=tuple(after), clock=clock)

    def init(self, keys: KeysLike, values: Tensor) -> int:
        """Give values to those of these keys that hold nothing yet; no clock advances. Returns a timestamp."""
        return self._ask(Kind.INIT_VALUES, _plain(keys), values)

    def wait(self, *timestamps: int) -> None:
        """Block until these requests are finished: a push has become part of an update, or the rule has dropped it.
        What a pull got is kept until `result` takes it.

        Raises:
            DeadlineExceeded: servers have been silent for too long; the message names them and the request.
            UsageError: a request, of these or an earlier one, was refused, or a function on the server failed.
            WireError: a server's answer cannot be read.
        """
        for timestamp in timestamps:
            while not self._core.is_done(timestamp) and not self._refusals:
                if not self._receive(self._deadline_s):
                    raise DeadlineExceeded(self._silence(timestamp))
        if self._refusals:
            raise self._refusals.pop(0)

    def result(self, timestamp: int) -> Pairs:
        """What a pull got, once it is there: of a list of keys all of them, with 0 for those that hold nothing. It can
        be had once. Raises as `wait`."""
        self.wait(timestamp)
        return self._core.take_pairs(timestamp)

    def clocks(self, keys: range) -> list[RangeClock]:
        """How far each worker's pushes have come, range by range. Raises as `wait`."""
        timestamp = self._ask(Kind.READ_CLOCKS, keys)
        self.wait(timestamp)
        return self._core.take_clocks(timestamp)

    def barrier(self) -> None:
        """Wait until every worker that has not left has come here. Raises as `wait`."""
        self.wait(self._ask(Kind.MEET))

    def close(self, *, waits: bool = True) -> None:
        """Leave: others wait for this worker no more. A second call does nothing.

        Args:
            waits: for what is still under way. Raises as `wait`. Else servers drop what has not begun.
        """
        if self._callers:
            try:
                leaving = self._ask(Kind.LEAVE, drops=not waits)
                if waits:
                    self.wait(*self._core.unfinished(), leaving)
            finally:
                for caller in self._callers:
                    caller.settle(within_s=_LINGER_S)
                    caller.close()
                self._callers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close(waits=kind is None)

    def _ask(self, kind: Kind, *content: Any, **about: Any) -> int:
        if not self._callers:
            raise UsageError(f"worker {self.worker} has closed its store")
        while self._receive(0.0):
            pass
        timestamp, sends = self._core.ask(kind, *content, **about)
        for index, message in sends:
            self._callers[index].send(message)
            self.sent_bytes += sum(map(len, message.encode_head())) + message.tensor_bytes
        return timestamp

    def _receive(self, timeout_s: float | None) -> bool:
        """Take what has come; whether something has in time."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not (has_come := self._take()) and (left_s := until_s - time.monotonic()) > 0:
            self._poller.poll(math.ceil(min(left_s, AGAIN_S) * 1000))
        return has_come

    def _take(self) -> bool:
        """Take one message from each server that has sent one. Returns whether any has."""
        has_come = False
        for index, caller in enumerate(self._callers):
            if (frames := caller.receive()) is None:
                continue
            has_come = True
            self.received_bytes += sum(map(len, frames))
            self._heard.add(index)
            try:
                self._core.receive(index, Message.decode(frames, epoch=EPOCH))
            except PacelineError as error:
                self._refusals.append(error)
        return has_come

    def _silence(self, timestamp: int) -> str:
        never = ", ".join(str(index) for index in range(len(self._callers)) if index not in self._heard)
        return (
            f"{self._core.owing(timestamp)}, and were silent for {self._deadline_s:g} s"
            f"{f' (of server(s) {never} nothing was ever heard)' if never else ''}. Either they wait for other "
            "workers, which have died or ended without closing their store; or another process is connected as worker "
            f"{self.worker}; or these servers have ended"
        )


def as_tensor(keys: KeysLike) -> Tensor:
    """Raises UsageError, which names one of a list that is no key."""
    if isinstance(keys, Tensor):
        return keys
    if isinstance(keys, range):
        return torch.arange(keys.start, keys.stop)
    return torch.tensor([_as_key(each) for each in keys], dtype=torch.int64)


def _as_key(given: object) -> int:
    """torch would cut a fraction off, and names no number that is too large."""
    try:
        key = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"keys are whole numbers, and {given!r} is none") from None
    if not 0 <= key < MOST_KEYS:
        raise UsageError(f"keys are whole numbers from 0 to {MOST_KEYS - 1}, and {key} is none of them")
    return key


def _plain(keys: KeysLike) -> Tensor | range:
    return keys if isinstance(keys, range) else as_tensor(keys)
