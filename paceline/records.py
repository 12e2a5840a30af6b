"""Typed facts about a run, and the files that hold them.

`steps.csv`, `metrics.csv` and `updates.csv` grow by rows; `evaluations.jsonl` and `events.jsonl` by lines. A line
counts once its end is written: what a killed run left after it is not read, and is cut off before more is appended.
"""

import csv
import io
import json
import os
import struct
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, ClassVar, TypeVar, final, get_type_hints

from paceline import durable
from paceline.errors import UsageError


@dataclass(slots=True)  # not frozen: every step makes one, which right after training takes 5 us instead of 15
class StepRecord:
    """One optimizer step of one worker. compute_s + communication_s + waiting_s is the step's whole time."""

    kind: ClassVar[str] = "steps"
    worker: int
    step: int
    """This worker's steps so far."""
    iteration: int
    """Global iteration after the step, as the literature counts it."""
    time_s: float
    """Training clock at the end of the step."""
    samples: int
    compute_s: float
    communication_s: float
    waiting_s: float
    moved_bytes: int
    staleness: int
    """How stale the gradient was that this step pushed; 0 if gradients are synchronous, -1 if it was not applied."""
    hidden_s: float
    """The part of compute_s in which gradients moved behind backward."""


@dataclass(frozen=True, slots=True)
class MetricRecord:
    kind: ClassVar[str] = "metrics"
    worker: int
    step: int
    iteration: int
    time_s: float
    name: str
    value: float


@dataclass(slots=True)
class UpdateRecord:
    kind: ClassVar[str] = "updates"
    server: int
    iteration: int
    worker: int
    clock: int
    staleness: int


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """The global model's metrics at one iteration."""

    kind: ClassVar[str] = "evaluations"
    iteration: int
    time_s: float
    samples: int
    """Samples that all workers have trained on."""
    metrics: dict[str, float]
    duration_s: float
    """Time the evaluation took, which is not on the training clock."""


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened once: ready, target reached, checkpoint, a failure."""

    kind: ClassVar[str] = "events"
    name: str
    who: str
    iteration: int
    time_s: float
    details: dict[str, Any]


Record = StepRecord | MetricRecord | UpdateRecord | EvaluationRecord | EventRecord
R = TypeVar("R", bound=Record)
RECORD_TYPES: tuple[type[Record], ...] = (StepRecord, MetricRecord, UpdateRecord, EvaluationRecord, EventRecord)
_BY_KIND = {record_type.kind: record_type for record_type in RECORD_TYPES}
_TABLES = (StepRecord, MetricRecord, UpdateRecord)
_VALUES_OF = {record_type: attrgetter(*record_type.__slots__) for record_type in RECORD_TYPES}
_PACKED_STEP = struct.Struct("<3q d q 3d 2q d")
_STEP_ROW = "%d,%d,%d,%.6f,%d,%.6f,%.6f,%.6f,%d,%d,%.6f\n"
"""Times to the microsecond: a row of 60 to 70 bytes. One template, because a launcher writes a row for every step of
every worker on cores that train."""
_METRIC_ROW = "%d,%d,%d,%r,%s,%r\n"


class Reporter(ABC):
    """Where a worker's or server's facts go, and where word to stop comes from."""

    keeps_files: ClassVar[bool] = True
    """Whether anything becomes of files."""
    writes_beside: ClassVar[bool] = False
    """Whether `save` may be called from a thread while others emit, and takes time of another process or a disk."""

    @abstractmethod
    def emit(self, record: Record) -> None:
        """Keep one record; must not block a training step."""

    @abstractmethod
    def save(self, name: str, content: bytes | memoryview) -> None:
        """Write one file of the result directory: readers see the old or the new one, never a part. Raises NotWritten,
        which names the file and the reason, if it cannot be written."""

    @abstractmethod
    def stop_requested(self) -> bool:
        """Whether the user asked the run to end at the next step."""


@final
class NullReporter(Reporter):
    """A script run on its own, with no result directory."""

    keeps_files: ClassVar[bool] = False

    def emit(self, record: Record) -> None:
        pass

    def save(self, name: str, content: bytes | memoryview) -> None:
        pass

    def stop_requested(self) -> bool:
        return False


def to_plain(record: Record) -> list[Any]:
    """A record as plain data: its kind, then its fields."""
    # Not `astuple`, whose deep copies cost ten times as much, for every step of every worker.
    return [record.kind, *_VALUES_OF[type(record)](record)]


def from_plain(data: list[Any]) -> Record:
    """The inverse of `to_plain`. Raises ValueError if the data is no record."""
    record_type = _BY_KIND.get(data[0]) if data and isinstance(data[0], str) else None
    if record_type is None or len(data) != 1 + len(record_type.__slots__):
        raise ValueError(f"not a record: {str(data)[:80]}")
    return record_type(*data[1:])


def pack_steps(records: Iterable[StepRecord]) -> bytes:
    """Step records as bytes, of the same length each: most of what a run sends, to a launcher that has little time."""
    return b"".join(_PACKED_STEP.pack(*_VALUES_OF[StepRecord](record)) for record in records)


def unpack_steps(content: bytes | memoryview) -> list[StepRecord]:
    """The inverse of `pack_steps`. Raises ValueError if the content is no whole number of records."""
    try:
        return [StepRecord(*values) for values in _PACKED_STEP.iter_unpack(content)]
    except struct.error as error:
        raise ValueError(f"no step records: {error}") from None


Row = tuple[type[Record], bytes]
"""What is appended to the file of records of this type."""


@final
class RecordWriter:
    """Appends records to the files of a result directory; rows reach the disk at `flush`. Of an iteration that is
    evaluated once more, since a worker has died meanwhile, the first evaluation stays."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, IO[bytes]] = {}
        self._evaluated: set[int] = set()

    def write(self, records: Iterable[Record]) -> None:
        """Raises as `rows`."""
        self.append(self.rows(records))

    def rows(self, records: Iterable[Record]) -> Iterator[Row]:
        """What `append` takes. Raises ValueError at a record that cannot be written, since it has values of other types
        than it should."""
        for record in records:
            try:
                if isinstance(record, EvaluationRecord):
                    if record.iteration in self._evaluated:
                        continue
                    self._evaluated.add(record.iteration)
                row = _row(record).encode()
            except (TypeError, ValueError, OverflowError, AttributeError) as error:
                raise ValueError(f"cannot write {str(record)[:80]}: {error}") from error
            yield type(record), row

    def append(self, rows: Iterable[Row]) -> None:
        for record_type, row in rows:
            self._open(record_type).write(row)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, record_type: type[Record]) -> IO[bytes]:
        if record_type.kind not in self._files:
            path = record_path(self._directory, record_type)
            num_bytes = _drop_torn_end(path)
            file = path.open("ab")
            self._files[record_type.kind] = file
            if num_bytes == 0 and record_type in _TABLES:
                file.write((",".join(field.name for field in fields(record_type)) + "\n").encode())
        return self._files[record_type.kind]


def _row(record: Record) -> str:
    if isinstance(record, StepRecord):
        return _STEP_ROW % _VALUES_OF[StepRecord](record)
    if isinstance(record, MetricRecord) and record.name.isidentifier():
        return _METRIC_ROW % _VALUES_OF[MetricRecord](record)
    if not isinstance(record, _TABLES):
        return json.dumps(asdict(record)) + "\n"
    row = io.StringIO()
    csv.writer(row, lineterminator="\n").writerow(_VALUES_OF[type(record)](record))
    return row.getvalue()


def record_path(directory: Path, record_type: type[R]) -> Path:
    suffix = "csv" if record_type in _TABLES else "jsonl"
    return directory / f"{record_type.kind}.{suffix}"


def read_records(directory: Path, record_type: type[R]) -> list[R]:
    """All records of one type in a result directory, in the order they were written; none if there is no such file.
    Raises UsageError, which says where, if something other than a torn last line is no such record."""
    return list(iterate_records(directory, record_type))


def iterate_records(directory: Path, record_type: type[R]) -> Iterator[R]:
    """As `read_records`, one at a time: a long run's file may be larger than memory."""
    path = record_path(directory, record_type)
    if not path.exists():
        return
    num_read = 0
    try:
        with path.open("rb") as file:
            complete = (line.decode() for line in file if line.endswith(b"\n"))
            for values in _values(complete, record_type):
                yield record_type(**values)
                num_read += 1
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: entry {num_read + 1} is no record of this version of Paceline: {error}") from None


def _values(lines: Iterator[str], record_type: type[Any]) -> Iterator[dict[str, Any]]:
    if record_type not in _TABLES:
        yield from (json.loads(line) for line in lines)
        return
    types = get_type_hints(record_type)
    rows = csv.reader(lines)
    columns = [(name, types[name]) for name in next(rows, ())]
    for row in rows:
        yield {name: kind(value) for (name, kind), value in zip(columns, row, strict=True)}


def _drop_torn_end(path: Path) -> int:
    """Cut off an unfinished last line; returns the bytes that are left, 0 if there is no file."""
    if not path.exists():
        return 0
    raw = path.read_bytes()
    num_bytes = raw.rfind(b"\n") + 1
    if num_bytes < len(raw):
        os.truncate(path, num_bytes)
    return num_bytes


def truncate(directory: Path, *, iteration: int) -> None:
    """Drop what was recorded after `iteration`, for a run that goes on from there.

    Each file is replaced as a whole: if this is interrupted, it is the old or the new one.
    """
    with tempfile.TemporaryDirectory(prefix=".truncate-", dir=directory) as scratch:
        writer = RecordWriter(Path(scratch))
        for record_type in RECORD_TYPES:
            records = iterate_records(directory, record_type)
            writer.write(record for record in records if record.iteration <= iteration)
        writer.close()
        for record_type in RECORD_TYPES:
            kept, path = record_path(Path(scratch), record_type), record_path(directory, record_type)
            if kept.exists():
                durable.replace(kept, path)
            else:
                path.unlink(missing_ok=True)


def summarise(metrics: Mapping[str, float]) -> str:
    """`accuracy 0.953, loss 0.17`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
