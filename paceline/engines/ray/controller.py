"""The launcher's end of every control line: records to disk, files in place, who is at which step."""

import collections
import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import zmq

from paceline.checkpoint_files import CheckpointFiles
from paceline.comm.run_store import StoreKeeper
from paceline.comm.wire import Keys, Listener
from paceline.engines.ray.control import LauncherAddress
from paceline.engines.ray.file_writing import FileWriting, reason
from paceline.engines.ray.record_writing import RecordWriting
from paceline.engines.standing import Progress
from paceline.engines.standstill import Standstill
from paceline.errors import RunFailed
from paceline.messages import Kind, Message, Raw, WireError, cut_into_frames, raw_bytes
from paceline.records import EventRecord, Record, from_plain, unpack_steps

_TURN_S = 0.2
_LAST_S = 10.0
"""Where the launcher lets go of its files, it waits no longer than this for what is not written yet."""
_STILL_S = 60.0
"""A run that has ended well waits so long for a disk that takes none of its last records."""


@final
class Controller:
    """Keeps the run's records and files. Everything but the writing to disk happens inside `turn`.

    Args:
        on_output: gets each line of the scripts' output, with who printed it.
        on_records: gets records as they come, the launcher's own among them.
        checkpoint: given to members that ask what to go on from.
        checkpoints: writes those that members send; none: keeps as many as a run does that was asked for nothing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str,
        epoch: int,
        on_output: Callable[[str, str], None],
        on_records: Callable[[Sequence[Record]], None] = lambda records: None,
        checkpoint: bytes = b"",
        checkpoints: CheckpointFiles | None = None,
    ) -> None:
        self._directory = directory
        self._files = FileWriting(directory, checkpoints or CheckpointFiles(directory))
        self._checkpoint = checkpoint
        self._keys = Keys.generate()
        self._listener = Listener(self._keys, host=host)
        self._poller = zmq.Poller()
        self._poller.register(self._listener.socket, zmq.POLLIN)
        self._poller.register(self._files, zmq.POLLIN)
        self._store = StoreKeeper()
        self._epoch = epoch
        self.run = uuid.uuid4().hex
        self._on_output, self._on_records = on_output, on_records
        self._records = RecordWriting(directory)
        self.num_steps: dict[str, int] = {}
        """How many steps every member had taken when it was last heard; for a server, its updates."""
        self.heard_s: dict[str, float] = {}
        """When each member was last heard, by the monotonic clock."""
        self.words: collections.deque[tuple[Kind, Mapping[str, Any]]] = collections.deque()
        """What members of a run that outlives deaths have said of themselves and of others."""
        self.serves: collections.deque[Mapping[str, Any]] = collections.deque()
        """Chains of servers, as those at their heads say that they serve them."""
        self.of_copies: collections.deque[tuple[Kind, Mapping[str, Any]]] = collections.deque()
        """Chains of servers, with what servers say of new copies, and of handing over."""
        self.expelled: set[str] = set()
        """Members on other hosts that were silent for too long: nothing that they say counts any more."""
        self.leases: Mapping[str, float | None] = {}
        """Members that go on only while they hear from here, and for how long without that; None: for ever."""
        self.epochs: dict[str, int] = {}
        """By member, the epoch of its data that it was in when it was last heard."""
        self.standstill = Standstill()
        self.gone: set[str] = set()
        """Members that have said all they had to say."""
        self.progress = Progress()
        self.has_heard_all = True
        """Whether the last turn has taken in all that had arrived."""

    @property
    def address(self) -> LauncherAddress:
        return LauncherAddress(self._listener.endpoint, self._keys, self._epoch, self.run)

    def turn(self, *, timeout_s: float) -> None:
        """Take in what has arrived, waiting up to `timeout_s` for the first message."""
        timeout_ms = int(timeout_s * 1000)
        until_s = time.monotonic() + timeout_s + _TURN_S
        while ready := dict(self._poller.poll(timeout_ms)):
            timeout_ms = 0
            if self._listener.socket in ready:
                heard = self._listener.receive()
                if heard is not None:
                    self._take(*heard)
            if self._files.fileno() in ready:
                self._answer_written()
            # Members that say much must not keep the launcher from looking after those that died.
            if time.monotonic() > until_s:
                break
        self.has_heard_all = not self._listener.socket.poll(0)

    def record(self, *records: Record) -> None:
        """Have records written, of a member or the launcher's own. Raises as `RecordWriter.rows`."""
        self._records.put(records)
        self.progress.take(records)
        self._on_records(records)

    def event(self, name: str, who: str = "run", **details: Any) -> None:
        """Write down that something happened, at the run's present iteration."""
        self.record(EventRecord(name, who, self.progress.iteration, self.progress.time_s, details))

    def tell_all(self, kind: Kind, **body: Any) -> None:
        for identity in self.num_steps:
            self.tell(identity, kind, **body)

    def tell(self, identity: str, kind: Kind, **body: Any) -> None:
        self.pass_on(identity, kind, (), **body)

    def pass_on(self, identity: str, kind: Kind, payload: Sequence[Raw], **body: Any) -> None:
        # A member that is gone has no route any more.
        with contextlib.suppress(zmq.ZMQError):
            self._listener.send(identity.encode(), Message(kind, self._epoch, body=body, payload=payload))

    def forget(self, identity: str) -> None:
        """This member's process has ended: what it was told need not arrive."""
        self._listener.forget(identity.encode())

    def finish_files(self, *, limit_s: float) -> bool:
        """Have what members have sent written, and answer them. Returns whether there was anything."""
        until_s, has_waited = time.monotonic() + limit_s, False
        while not self._files.wait(limit_s=_TURN_S) and time.monotonic() < until_s:
            has_waited = True
            self.turn(timeout_s=0.0)  # members wait for word from here
        return self._answer_written() > 0 or has_waited

    def finish_records(self) -> None:
        """Wait until all records so far are on the disk, for as long as that takes any. Raises RunFailed if it stands
        still, or they cannot be written."""
        if not self._records.wait(still_s=_STILL_S):
            raise RunFailed(
                f"the last records are not written in {self._directory}: its disk has taken nothing for "
                f"{_STILL_S:.0f} s. All workers have come to their ends, and what they have saved is there"
            )
        self.raise_write_error()

    def close(self) -> None:
        for what, writing in (("records are", self._records), ("a file is", self._files)):
            if not writing.close(limit_s=_LAST_S):
                given_up = f"{what} not yet written in {self._directory} after {_LAST_S:.0f} s, and given up"
                print(given_up, file=sys.stderr, flush=True)
        self._listener.close()

    def _take(self, name: bytes, frames: Sequence[Raw]) -> None:
        identity = name.decode(errors="replace")
        if identity in self.expelled:
            return
        try:
            message = Message.decode(frames, epoch=self._epoch)
            if message.kind is Kind.STORE:
                self._listener.send(name, self._store.answer(message))
                return
            self.num_steps.setdefault(identity, 0)
            if message.kind is Kind.PULSE:
                self.num_steps[identity] = num_steps = message.iteration
                self.heard_s[identity] = now_s = time.monotonic()
                awaits_others, self.epochs[identity] = message.body["awaits_others"], message.body["epoch"]
                self.standstill.hear(identity, num_steps=num_steps, awaits_others=awaits_others, now_s=now_s)
                if identity in self.leases:
                    lease = {"length_s": self.leases[identity], "asked_s": message.body["now_s"]}
                    self._listener.send(name, Message(Kind.LEASE, self._epoch, body=lease), keep=False)
            elif message.kind is Kind.RECORDS:
                steps = [step for frame in message.payload for step in unpack_steps(raw_bytes(frame))]
                records = [*steps, *(from_plain(record) for record in message.body["records"])]
                self.record(*records)
            elif message.kind is Kind.OUTPUT:
                for line in message.body["lines"]:
                    self._on_output(identity, str(line))
            elif message.kind is Kind.FILE:
                are_recorded = self._records.mark()  # what was before a checkpoint is to be there when that is
                self._files.begin(identity, str(message.body.get("name")), message.payload, after=are_recorded)
            elif message.kind is Kind.RESULT:
                self.words.append((message.kind, {**message.body, "payload": message.payload}))
            elif message.kind in (Kind.REPORT, Kind.GIFT, Kind.TAKE, Kind.RETIRED, Kind.ENDS, Kind.LANE):
                self.words.append((message.kind, message.body))
            elif message.kind is Kind.SERVES:
                self.serves.append(message.body)
            elif message.kind in (Kind.COPIED, Kind.HANDED_OVER):
                self.of_copies.append((message.kind, message.body))
            elif message.kind is Kind.GOODBYE:
                self.gone.add(identity)
            elif message.kind is Kind.LOAD:
                frames_of_checkpoint = cut_into_frames(self._checkpoint)
                self._listener.send(name, Message(Kind.CONTENT, self._epoch, payload=frames_of_checkpoint))
        except (WireError, ValueError, TypeError, KeyError) as error:
            self.event("refused", identity, error=str(error))

    def _answer_written(self) -> int:
        written = self._files.take_written()
        for identity, error in written:
            self.tell(identity, Kind.FILE_WRITTEN, error=error)
        return len(written)

    def raise_write_error(self) -> None:
        """Raises RunFailed if records cannot be written, as on a full disk."""
        error = self._records.error
        if error is not None:
            why = reason(error, self._directory) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise RunFailed(f"cannot write records: {why}")
