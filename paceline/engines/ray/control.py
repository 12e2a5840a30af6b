"""A worker's or server's line to the launcher: records and files go out, word to stop comes in."""

import collections
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import zmq

from paceline.comm.wire import Caller, Keys
from paceline.elastic import Lease
from paceline.engines.ray.world_spec import ServerInfo, joined_of
from paceline.errors import Aborted, NotWritten
from paceline.messages import Kind, Message, Raw, cut_into_frames, raw_bytes
from paceline.records import EvaluationRecord, EventRecord, Record, Reporter, StepRecord, pack_steps, to_plain
from paceline.server.chains import Chain, from_body

_PULSE_S = 0.1
# Records of steps wait for more of them: a launcher that takes many at a time keeps the cores from training for less
# time, 0.5 instead of 1.1 % of a conv net's step. Evaluations and events do not wait, nor does anything that was
# recorded before them.
_PULSES_PER_BATCH = 5
_LAST_WORDS_S = 5.0  # how long a member that ends waits for a busy launcher to take what it has left to say


@dataclass(frozen=True)
class LauncherAddress:
    """Where the launcher of a run listens."""

    endpoint: str
    keys: Keys
    epoch: int
    run: str
    """Names the run among all others on its hosts."""


@final
class ControlLine(Reporter):
    """Owns one socket and the thread that uses it, so that emitting a record costs a training step an append.

    Args:
        launcher: whom to speak to.
        identity: `worker-0`, `server-1`.
        progress: asked at every pulse for the step this process is at.
        awaits_others: asked at every pulse whether this process waits in a pause, or at its end, for others to come.
        epoch: asked at every pulse for the epoch of the data that this process is in.
        on_abort: called, in the line's thread, with the reason when the launcher ends the run.
        on_chain: called there with each chain of servers that has changed, and with the servers that have joined.
        on_lease_ended: called there when the launcher, which has lent this process a lease, does not renew it.
    """

    writes_beside = True

    def __init__(
        self,
        launcher: LauncherAddress,
        *,
        identity: str,
        progress: Callable[[], int],
        on_abort: Callable[[str], None],
        awaits_others: Callable[[], bool] = lambda: False,
        epoch: Callable[[], int] = lambda: 0,
        on_chain: Callable[[Chain, Mapping[int, ServerInfo]], None] = lambda chain, joined: None,
        on_lease_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._launcher, self._identity = launcher, identity
        self._progress, self._on_abort, self._awaits_others = progress, on_abort, awaits_others
        self._epoch, self._on_chain = epoch, on_chain
        self._lease, self._on_lease_ended = Lease(), on_lease_ended
        self._records: collections.deque[Record] = collections.deque()
        self._is_urgent = False
        self._num_pulses = 0
        self._output: collections.deque[str] = collections.deque()
        self._outbox: collections.deque[Message] = collections.deque()
        self._stop = False
        self._abort_reason: str | None = None
        self._is_closing = threading.Event()
        self._saving = threading.Lock()
        self._written = threading.Event()
        self._write_error: str | None = None
        self._loaded = threading.Event()
        self._content = b""
        self._answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.asked_to_give: tuple[int, ...] = ()
        self.gives_to_other_hosts = False
        """Ranks that wait for this worker's state."""
        self.is_asked_to_leave = False
        self.on_lost: Callable[[int, Sequence[int]], None] = lambda epoch, gone: None
        """Called in the line's thread: these of an epoch of membership, the present or an earlier one, are gone, or
        others join."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._speak, name="paceline-control", daemon=True)
        self._thread.start()

    def emit(self, record: Record) -> None:
        self._records.append(record)
        if isinstance(record, (EvaluationRecord, EventRecord)):
            self._is_urgent = True
            os.eventfd_write(self._wake, 1)  # at once: that training has begun is to be known if this process dies next

    def say(self, text: str) -> None:
        """Show a line of the script's output where the run was started."""
        self._output.append(text)

    def save(self, name: str, content: bytes | memoryview) -> None:
        frames = cut_into_frames(content)
        with self._saving:  # one at a time: answers do not say of which file they are
            self._written.clear()
            self._outbox.append(Message(Kind.FILE, self._launcher.epoch, body={"name": name}, payload=frames))
            os.eventfd_write(self._wake, 1)
            while not self._written.wait(_PULSE_S):
                if self._abort_reason is not None:
                    raise Aborted(f"{name} was not written: {self._abort_reason}")
            if self._write_error is not None:
                raise NotWritten(f"cannot write {name}: {self._write_error}")

    def load_checkpoint(self) -> bytes:
        """What the run is to go on from. Parameters come this way, not through Ray's object store. Raises Aborted if
        the run ended before it came."""
        self._outbox.append(Message(Kind.LOAD, self._launcher.epoch))
        while not self._loaded.wait(_PULSE_S):
            if self._abort_reason is not None:
                raise Aborted(f"the checkpoint did not come: {self._abort_reason}")
        return self._content

    def tell(self, kind: Kind, body: Mapping[str, Any], payload: Sequence[Raw] = ()) -> None:
        """Tell the launcher at once."""
        self._outbox.append(Message(kind, self._launcher.epoch, body=body, payload=payload))
        os.eventfd_write(self._wake, 1)

    def ask(self, kind: Kind, body: Mapping[str, Any], payload: Sequence[Raw] = ()) -> Mapping[str, Any]:
        """Tell the launcher, and wait for the next word of who goes on. Raises Aborted if the run ends."""
        self.tell(kind, body, payload)
        while True:
            try:
                return self._answers.get(timeout=_PULSE_S)
            except queue.Empty:
                if self._abort_reason is not None:
                    raise Aborted(f"nobody said who goes on: {self._abort_reason}") from None

    def check(self) -> None:
        """Raise Aborted if the run ends."""
        if self._abort_reason is not None:
            raise Aborted(self._abort_reason)

    def stop_requested(self) -> bool:
        return self._stop

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._is_closing.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=_LAST_WORDS_S + 1)

    def _speak(self) -> None:
        caller = Caller(self._launcher.keys, endpoint=self._launcher.endpoint, identity=self._identity)
        poller = zmq.Poller()
        for each in caller.sockets:
            poller.register(each, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        is_answered = False
        try:
            while not self._is_closing.is_set():
                if not is_answered:
                    self._send_all(caller)
                ready = dict(poller.poll(int(_PULSE_S * 1000)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                is_answered = False
                frames = caller.receive()
                if frames is not None:
                    message = Message.decode(frames, epoch=self._launcher.epoch)
                    self._hear(message)
                    # Another pulse would ask for another lease, and so on without a pause.
                    is_answered = message.kind is Kind.LEASE and self._wake not in ready
                elif self._lease.has_ended(now_s=time.monotonic()):  # and nothing that has come is unheard
                    self._on_lease_ended()
            self._send_all(caller)
            caller.send(Message(Kind.GOODBYE, self._launcher.epoch))
            caller.settle(within_s=_LAST_WORDS_S)
        finally:
            caller.close()

    def _send_all(self, caller: Caller) -> None:
        epoch = self._launcher.epoch
        self._num_pulses += 1
        if self._is_urgent or self._outbox or self._is_closing.is_set() or self._num_pulses % _PULSES_PER_BATCH == 0:
            self._send_records(caller)
        lines = [self._output.popleft() for _ in range(len(self._output))]
        if lines:
            caller.send(Message(Kind.OUTPUT, epoch, body={"lines": lines}))
        while self._outbox:
            caller.send(self._outbox.popleft())
        standing = {"awaits_others": self._awaits_others(), "epoch": self._epoch(), "now_s": time.monotonic()}
        pulse = Message(Kind.PULSE, epoch, iteration=self._progress(), body=standing)
        caller.send(pulse, keep=False)  # the next one says more

    def _send_records(self, caller: Caller) -> None:
        self._is_urgent = False  # before they are taken: one that comes meanwhile makes it so again
        records = [self._records.popleft() for _ in range(len(self._records))]
        if records:
            steps = pack_steps(record for record in records if isinstance(record, StepRecord))
            others = [to_plain(record) for record in records if not isinstance(record, StepRecord)]
            caller.send(Message(Kind.RECORDS, self._launcher.epoch, body={"records": others}, payload=[steps]))

    def _hear(self, message: Message) -> None:
        if message.kind is Kind.FILE_WRITTEN:
            self._write_error = message.body.get("error")
            self._written.set()
        elif message.kind is Kind.CONTENT:
            self._content = b"".join(raw_bytes(frame) for frame in message.payload)
            self._loaded.set()
        elif message.kind in (Kind.FORM, Kind.STATE, Kind.LANES):
            if message.kind is Kind.FORM:
                self.asked_to_give = ()  # who waits still is named anew
            self._answers.put({**message.body, "payload": message.payload})
        elif message.kind is Kind.LOST:
            self.on_lost(message.body["epoch"], message.body["gone"])
        elif message.kind is Kind.LEASE:
            self._lease = Lease.granted(message.body["length_s"], asked_s=message.body["asked_s"])
        elif message.kind is Kind.GIVE:
            self.asked_to_give, self.gives_to_other_hosts = tuple(message.body["ranks"]), message.body["is_far"]
        elif message.kind is Kind.RETIRE:
            self.is_asked_to_leave = True
        elif message.kind is Kind.CHAIN:
            self._on_chain(from_body(message.body), joined_of(message.body))
        elif message.kind is Kind.STOP:
            self._stop = True
        elif message.kind is Kind.ABORT:
            self._abort_reason = str(message.body.get("reason"))
            self._on_abort(self._abort_reason)
