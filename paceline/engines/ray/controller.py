"""The launcher's end of every control line: records to disk, files in place, who is at which step."""

import collections
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import zmq

from paceline import durable
from paceline.comm.run_store import StoreKeeper
from paceline.comm.wire import Keys, Listener
from paceline.engines.ray.control import LauncherAddress
from paceline.engines.standing import Progress
from paceline.engines.standstill import Standstill
from paceline.errors import RunFailed
from paceline.messages import Kind, Message, WireError, cut_into_frames, raw_bytes
from paceline.records import EventRecord, Record, RecordWriter, from_plain, unpack_steps

_TURN_S = 0.2
# The names a member may write, so that nobody writes outside the result directory.
_FILES = frozenset({"checkpoint.pt", "model.safetensors", "rows.safetensors"})


@final
class Controller:
    """Keeps the run's records and files. Single-threaded: everything happens inside `turn`.

    Args:
        on_output: gets each line of the scripts' output, with who printed it.
        on_records: gets records once they are written, the launcher's own among them.
        checkpoint: given to members that ask what to go on from.
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
    ) -> None:
        self._directory = directory
        self._checkpoint = checkpoint
        self._keys = Keys.generate()
        self._listener = Listener(self._keys, host=host)
        self._store = StoreKeeper()
        self._epoch = epoch
        self.run = uuid.uuid4().hex
        self._on_output, self._on_records = on_output, on_records
        self._writer = RecordWriter(directory)
        self.num_steps: dict[str, int] = {}
        """Of every member heard so far: its steps (of a server: updates) when it was last heard."""
        self.heard_s: dict[str, float] = {}
        """When each member was last heard, by the monotonic clock."""
        self.words: collections.deque[tuple[Kind, Mapping[str, Any]]] = collections.deque()
        """What members of an elastic run have said of themselves and of others."""
        self.epochs: dict[str, int] = {}
        """Of the data, which each member was in when it was last heard."""
        self.standstill = Standstill()
        self.gone: set[str] = set()
        """Members that have said all they had to say."""
        self.progress = Progress()
        self.write_error: str | None = None
        """Why records can no longer be written, once that is so."""

    @property
    def address(self) -> LauncherAddress:
        return LauncherAddress(self._listener.endpoint, self._keys, self._epoch, self.run)

    def turn(self, *, timeout_s: float) -> None:
        """Take in what has arrived, waiting up to `timeout_s` for the first message."""
        timeout_ms = int(timeout_s * 1000)
        has_heard = False
        until_s = time.monotonic() + timeout_s + _TURN_S
        while self._listener.socket.poll(timeout_ms, zmq.POLLIN):
            timeout_ms = 0
            has_heard = True
            self._take(self._listener.socket.recv_multipart(copy=False))
            # Members that say much must not keep the launcher from looking after those that died.
            if time.monotonic() > until_s:
                break
        if has_heard:
            self._guarded(self._writer.flush)

    def record(self, *records: Record) -> None:
        """Write records of the launcher's own."""
        self._guarded(lambda: self._writer.write(records))
        self._on_records(records)

    def event(self, name: str, who: str = "run", **details: Any) -> None:
        """Write down that something happened, at the run's present iteration."""
        self.record(EventRecord(name, who, self.progress.iteration, self.progress.time_s, details))

    def tell_all(self, kind: Kind, **body: Any) -> None:
        for identity in self.num_steps:
            self.tell(identity, kind, **body)

    def tell(self, identity: str, kind: Kind, **body: Any) -> None:
        # A member that is gone has no route any more.
        with contextlib.suppress(zmq.ZMQError):
            self._listener.send(identity.encode(), Message(kind, self._epoch, body=body))

    def close(self) -> None:
        self._guarded(self._writer.close)
        self._listener.close()

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        identity = frames[0].bytes.decode(errors="replace")
        try:
            message = Message.decode(frames[1:], epoch=self._epoch)
            if message.kind is Kind.STORE:
                self._listener.send(frames[0].bytes, self._store.answer(message))
                return
            self.num_steps.setdefault(identity, 0)
            if message.kind is Kind.PULSE:
                self.num_steps[identity] = num_steps = message.iteration
                self.heard_s[identity] = now_s = time.monotonic()
                awaits_others, self.epochs[identity] = message.body["awaits_others"], message.body["epoch"]
                self.standstill.hear(identity, num_steps=num_steps, awaits_others=awaits_others, now_s=now_s)
            elif message.kind is Kind.RECORDS:
                steps = [step for frame in message.payload for step in unpack_steps(raw_bytes(frame))]
                records = [*steps, *(from_plain(record) for record in message.body["records"])]
                self.record(*records)
                self.progress.take(records)
            elif message.kind is Kind.OUTPUT:
                for line in message.body["lines"]:
                    self._on_output(identity, str(line))
            elif message.kind is Kind.FILE:
                self._write_file(identity, message)
            elif message.kind in (Kind.REPORT, Kind.GIFT, Kind.TAKE, Kind.RETIRED):
                self.words.append((message.kind, message.body))
            elif message.kind is Kind.GOODBYE:
                self.gone.add(identity)
            elif message.kind is Kind.LOAD:
                frames_of_checkpoint = cut_into_frames(self._checkpoint)
                self._listener.send(frames[0].bytes, Message(Kind.CONTENT, self._epoch, payload=frames_of_checkpoint))
        except (WireError, ValueError, TypeError, KeyError) as error:
            self.event("refused", identity, error=str(error))

    def _write_file(self, identity: str, message: Message) -> None:
        """Whole or not at all: a full disk leaves the file that was there before."""
        name = str(message.body.get("name"))
        error: str | None = None
        try:
            if name not in _FILES:
                raise WireError(f"refused to write {name!r}")
            with durable.whole(self._directory / name) as partial, partial.open("wb") as file:
                file.writelines(map(raw_bytes, message.payload))
        except (OSError, WireError) as failure:
            error = _reason(failure, self._directory)
        self._listener.send(identity.encode(), Message(Kind.FILE_WRITTEN, self._epoch, body={"error": error}))

    def _guarded(self, write: Callable[[], None]) -> None:
        """A full disk ends the run with its reason; the run's own loop raises it."""
        try:
            write()
        except OSError as error:
            self.write_error = f"cannot write records: {_reason(error, self._directory)}"

    def raise_write_error(self) -> None:
        if self.write_error is not None:
            raise RunFailed(self.write_error)


def _reason(error: Exception, directory: Path) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror} in {directory.resolve()}; what was there before is intact"
    return str(error)
