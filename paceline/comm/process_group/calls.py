"""The order of operations on a torch.distributed backend, and the waits for them: with deadlines that name a rank."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, final
from weakref import WeakSet

from paceline.comm.arguments import timeout_of
from paceline.comm.base import Timing, Work
from paceline.comm.process_group.peer_watch import PeerWatch
from paceline.comm.rank_errors import ALIKE, disagreement, late
from paceline.comm.works import OwnedWork
from paceline.errors import CallMismatch, PacelineError, PeerLost, UsageError

LOOK_INTERVAL_S = 0.2
# NCCL's waits return when the work is enqueued, so its works are asked again and again.
_ASK_INTERVAL_S = 50e-6
# For so long what a rank sent before it left may still arrive, and so may word of why it left.
_GRACE_S = 1.0


@final
class WatchedMessage:
    """A message over gloo, which tells that one is over only to whoever blocks on it: a thread calls `watch`."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._failure: str | None = None
        self._is_over = threading.Event()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def sleep(self, timeout_s: float) -> None:
        self._is_over.wait(timeout_s)

    def wait(self) -> None:
        self._is_over.wait()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def watch(self) -> None:
        """Block until the backend's work is over, and remember how it ended."""
        try:
            self._work.wait(timeout_of(None))  # whoever waits has a deadline; gloo's would close the connection
        except RuntimeError as error:
            self._failure = str(error)  # its frames hold the work
        self._is_over.set()


@dataclass(eq=False)
class _Operation:
    name: str
    start: Callable[[], Any] | None
    finish: Callable[[], None] | None
    number: int = 0
    """0 of a message."""
    peer: int | None = None
    place: int = 0
    """For a receive: how many messages have been asked of this sender, up to this one."""
    started: Any = None
    is_agreed: bool = True
    is_told: bool = False
    is_stood_at: bool = False
    is_over: bool = False


@final
class TorchCalls:
    """Starts operations in their order, waits for them and finds out who keeps them.

    Collective operations are numbered. A rank that has waited for a while tells the others the number and what the
    operation is: so a deadline names who is missing, and ranks that disagree find out. An operation of a new form
    starts only when all ranks have told the same, since gloo ends the processes of ranks that disagree. Once a form was
    agreed on, nothing is told. A rank that waits for a message so finds out that its sender waits for it elsewhere.
    """

    def __init__(self, watch: PeerWatch, *, timing: Timing, deadline_s: float | None, is_nccl: bool) -> None:
        """Owns `watch` from here on."""
        self.deadline_s = deadline_s
        self._timing = timing
        self._watch = watch
        self._is_nccl = is_nccl
        self._failure: PacelineError | None = None
        self._num_issued = 0
        self._to_start: deque[_Operation] = deque()
        self._under_way: dict[int, _Operation] = {}
        self._messages: WeakSet[_Operation] = WeakSet()  # under way, that somebody may wait for yet
        self._agreed: set[str] = set()
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        self._last_look_s = 0.0
        self._gone_since_s: float | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether operations or messages have been started, and are not over."""
        return bool(self._under_way or self._messages)

    def submit(
        self, operation: str, start: Callable[[], Any], *, num_bytes: int, finish: Callable[[], None] | None = None
    ) -> Work:
        """Issue a collective operation, which all ranks must call the same; never blocks.

        `finish` is called once when the operation is over.
        """
        self.check()
        self._num_issued += 1
        work = _Operation(operation, start, finish, number=self._num_issued)
        self._timing.moved_bytes += num_bytes
        self._under_way[work.number] = work
        if operation not in self._agreed:
            self._agreed.add(operation)
            work.is_agreed = False
            self._tell(work)
        self._to_start.append(work)
        self._start_all()
        return OwnedWork(self, work)

    def submit_message(
        self,
        operation: str,
        start: Callable[[], Any],
        *,
        peer: int,
        is_sent: bool,
        num_bytes: int,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Issue a message to or from one other rank; never blocks."""
        self.check()
        (self._num_sent if is_sent else self._num_received)[peer] += 1
        work = _Operation(operation, start, finish, peer=peer, place=0 if is_sent else self._num_received[peer])
        self._timing.moved_bytes += num_bytes
        self._messages.add(work)
        self._start(work)
        return OwnedWork(self, work)

    def poll(self, work: _Operation) -> bool:
        """Advance without blocking; whether the work is over."""
        if work.is_over:
            return True
        self.check()
        if self._is_completed(work):
            self._complete(work)
        else:
            self._look(work)
        return work.is_over

    def wait(self, work: _Operation) -> None:
        if work.is_over:
            return
        started_s = time.perf_counter()
        try:
            while not self._is_completed(work):
                self.check()
                waited_s = time.perf_counter() - started_s
                left_s = LOOK_INTERVAL_S if self.deadline_s is None else self.deadline_s - waited_s
                if left_s <= 0:
                    self._exceed(work)
                if waited_s >= LOOK_INTERVAL_S:
                    self._stand(work)
                    self._look(work)
                    self._require_moving(work)
                self._sleep(work, min(left_s, LOOK_INTERVAL_S))
            self._complete(work)
        finally:
            self._timing.communication_s += time.perf_counter() - started_s

    def check(self) -> None:
        """Raise if an operation has failed, or all were aborted or closed."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)  # a new one: its frames hold operations

    def fail(self, error: PacelineError) -> NoReturn:
        """Refuse everything from now on, tell the others, and raise."""
        self.leave(error)
        try:
            raise error
        finally:
            del error  # else this frame and the error hold each other, and operations with them

    def leave(self, error: PacelineError) -> None:
        """Refuse everything from now on and tell the others; callable from any thread, the first reason stays."""
        if self._failure is None:
            self._failure = type(error)(f"this collective is unusable since: {error}")
            self._watch.leave(self._num_completed(), str(error))

    def close(self) -> None:
        """Leave, and give back what this holds. A second call does nothing."""
        self.leave(UsageError("it was closed"))
        self._to_start.clear()
        self._under_way.clear()
        self._messages.clear()
        self._watch.close()

    def _num_completed(self) -> int:
        # A copy: another thread may abort while this one works.
        return min(list(self._under_way), default=self._num_issued + 1) - 1

    def _start_all(self) -> None:
        while self._to_start and self._has_agreement(self._to_start[0]):
            self._start(self._to_start.popleft())

    def _start(self, work: _Operation) -> None:
        assert work.start is not None  # it is not over
        with self._translated(work):
            work.started = work.start()

    def _is_completed(self, work: _Operation) -> bool:
        if self._to_start:
            self._start_all()
        return work.started is not None and bool(work.started.is_completed())

    def _complete(self, work: _Operation) -> None:
        with self._translated(work):
            work.started.wait()
        if work.finish is not None:
            work.finish()
        self._under_way.pop(work.number, None)
        self._messages.discard(work)
        work.is_over = True
        work.start = work.finish = work.started = None  # they hold tensors

    def _sleep(self, work: _Operation, timeout_s: float) -> None:
        if work.started is None:
            self._watch.wait(timeout_s)
        elif isinstance(work.started, WatchedMessage):
            work.started.sleep(timeout_s)
        elif self._is_nccl:
            time.sleep(_ASK_INTERVAL_S)
        else:
            # A wait that times out does gloo's operation no harm. An event set by a callback took ten times as long
            # for 12 KB: gloo's thread first had to get the interpreter lock.
            with suppress(RuntimeError):
                work.started.wait(timedelta(seconds=timeout_s))

    def _tell(self, work: _Operation) -> None:
        if work.number and not work.is_told:
            work.is_told = True
            self._watch.tell(work.number, work.name)

    def _stand(self, work: _Operation) -> None:
        """Tell the others that this rank does nothing else before this operation, in which all take part, is over."""
        if work.number and not work.is_stood_at:
            work.is_told = work.is_stood_at = True
            self._watch.stand(work.number, work.name, self._num_sent)

    def _require_moving(self, work: _Operation) -> None:
        """Raise CallMismatch if a message cannot come: its sender has not sent it, and waits for this rank in an
        operation beyond all that this one has asked for."""
        peer = self._watch.peers[work.peer] if work.place and work.peer is not None else None
        if peer is not None and peer.stands_at > self._num_issued and peer.num_sent < work.place:
            mine = self._watch.rank
            theirs = peer.calls.get(peer.stands_at, "an operation")
            self.fail(
                CallMismatch(
                    f"rank {mine} waits for {work.name}, which waits for rank {mine} to take part in {theirs}; {ALIKE}"
                )
            )

    def _has_agreement(self, work: _Operation) -> bool:
        if not work.is_agreed:
            self._hear()
            work.is_agreed = not self._watch.missing(work.number)
        return work.is_agreed

    def _look(self, work: _Operation) -> None:
        """Raise if the work will never be over; a real look only now and then."""
        now_s = time.perf_counter()
        if now_s - self._last_look_s < LOOK_INTERVAL_S:
            return
        self._last_look_s = now_s
        self._tell(work)
        self._hear()
        if not self._culprits(work):
            self._gone_since_s = None
        elif self._gone_since_s is None:
            self._gone_since_s = now_s
        elif now_s - self._gone_since_s >= _GRACE_S:
            self._lose(work)

    def _hear(self) -> None:
        """Raise if another rank says that it takes part in an operation that is under way here as something else."""
        self._watch.look()
        num_completed = self._num_completed()
        for rank, peer in self._watch.peers.items():
            for number in [number for number in peer.calls if number <= self._num_issued]:
                theirs, mine = peer.calls[number], self._under_way.get(number)
                if mine is not None and theirs != mine.name:
                    self._tell(mine)
                    self.fail(disagreement({self._watch.rank: mine.name, rank: theirs}))
                if number <= num_completed:
                    del peer.calls[number]

    def _culprits(self, work: _Operation) -> list[str]:
        return [
            f"rank {rank} is lost: {peer.departure}"
            for rank, peer in self._watch.peers.items()
            if peer.departure is not None
            and (work.peer == rank if work.peer is not None else peer.num_completed < work.number)
        ]

    def _lose(self, work: _Operation, error: object = None) -> NoReturn:
        culprits: list[str] = []
        until_s = time.perf_counter() + _GRACE_S
        while not culprits and time.perf_counter() < until_s:
            self._watch.wait(0.05)
            self._hear()
            culprits = self._culprits(work)
        why = "; ".join(culprits) if culprits else "a peer is lost"
        self.fail(PeerLost(f"{why} during {work.name}" + (f": {error}" if error is not None else "")))

    def _exceed(self, work: _Operation) -> NoReturn:
        missing = [work.peer] if work.peer is not None else []
        if work.number:
            self._hear()
            missing = self._watch.missing(work.number)
        self.fail(late(missing, work.name, self.deadline_s))

    @contextmanager
    def _translated(self, work: _Operation) -> Iterator[None]:
        """Raise the backend's errors as Paceline's, and remember them."""
        try:
            yield
        except RuntimeError as error:
            self.check()
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                self._exceed(work)
            self._lose(work, error)
