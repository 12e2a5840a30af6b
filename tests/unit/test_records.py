"""Records in files: what is written reads back, whatever happens to the last line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.records import (
    RECORD_TYPES,
    EvaluationRecord,
    EventRecord,
    MetricRecord,
    Record,
    RecordWriter,
    StepRecord,
    UpdateRecord,
    from_plain,
    pack_steps,
    read_records,
    record_path,
    summarise,
    to_plain,
    truncate,
    unpack_steps,
)

INTS = st.integers(-1, 2**40)
TIMES = st.integers(0, 10**12).map(lambda microseconds: microseconds / 1e6)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
PLAIN = st.recursive(st.none() | st.booleans() | INTS | FLOATS | TEXTS, lambda inner: st.lists(inner, max_size=3))
RECORDS: dict[type[Record], st.SearchStrategy[Any]] = {
    StepRecord: st.builds(
        StepRecord, INTS, INTS, INTS, TIMES, INTS, TIMES, TIMES, TIMES, moved_bytes=INTS, staleness=INTS, hidden_s=TIMES
    ),
    MetricRecord: st.builds(MetricRecord, INTS, INTS, INTS, FLOATS, TEXTS, FLOATS),
    UpdateRecord: st.builds(UpdateRecord, INTS, INTS, INTS, INTS, INTS),
    EvaluationRecord: st.builds(
        EvaluationRecord, INTS, FLOATS, INTS, st.dictionaries(TEXTS, FLOATS, max_size=3), FLOATS
    ),
    EventRecord: st.builds(EventRecord, TEXTS, TEXTS, INTS, FLOATS, st.dictionaries(TEXTS, PLAIN, max_size=3)),
}
STEP = StepRecord(1, 2, 3, 4.5, 6, 0.1, 0.2, 0.3, 700, 8, 0.05)
UPDATES = [UpdateRecord(0, iteration, 1, 2, 3) for iteration in range(1, 6)]
EVENTS = [EventRecord("ready", "run", iteration, 0.5, {"a": [1]}) for iteration in range(1, 6)]


def write(directory: Path, records: list[Any]) -> None:
    writer = RecordWriter(directory)
    writer.write(records)
    writer.close()


@pytest.mark.parametrize("record_type", RECORD_TYPES)
@given(data=st.data())
def test_records_read_back_as_written(
    record_type: type[Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("run")
    once_evaluated = (lambda record: record.iteration) if record_type is EvaluationRecord else None
    records = data.draw(st.lists(RECORDS[record_type], max_size=5, unique_by=once_evaluated))
    half = len(records) // 2
    write(directory, records[:half])
    write(directory, records[half:])  # another process goes on with the same files
    assert read_records(directory, record_type) == records
    for record in records:
        assert from_plain(to_plain(record)) == record


def test_an_iteration_is_evaluated_once(tmp_path: Path) -> None:
    """Whoever takes the place of the first worker says it again, in case that has not."""
    first, again, later = (
        EvaluationRecord(iteration, time_s, 10, {"loss": 0.5}, 0.1)
        for iteration, time_s in ((3, 1.0), (3, 2.0), (6, 3.0))
    )
    write(tmp_path, [first, again, later])
    assert read_records(tmp_path, EvaluationRecord) == [first, later]


def test_records_reach_the_disk_at_flush(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.write([STEP, UPDATES[0], EVENTS[0]])
    writer.flush()
    assert read_records(tmp_path, StepRecord) == [STEP]
    assert read_records(tmp_path, UpdateRecord) == UPDATES[:1]
    assert read_records(tmp_path, EventRecord) == EVENTS[:1]
    assert read_records(tmp_path, MetricRecord) == []
    writer.close()
    header, row = record_path(tmp_path, StepRecord).read_text().splitlines()
    assert header.startswith("worker,step,iteration,time_s,")
    assert row == "1,2,3,4.500000,6,0.100000,0.200000,0.300000,700,8,0.050000"


def test_numbers_that_are_not_finite_survive(tmp_path: Path) -> None:
    write(tmp_path, [MetricRecord(0, 1, 1, 0.0, "loss", value) for value in (math.nan, math.inf, -math.inf)])
    write(tmp_path, [EvaluationRecord(1, 0.0, 1, {"loss": math.nan}, 0.0)])
    values = [record.value for record in read_records(tmp_path, MetricRecord)]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]
    assert math.isnan(read_records(tmp_path, EvaluationRecord)[0].metrics["loss"])


@pytest.mark.parametrize("records", [UPDATES, EVENTS], ids=["csv", "jsonl"])
def test_a_file_cut_off_anywhere_is_readable_and_can_be_appended_to(records: list[Any], tmp_path: Path) -> None:
    record_type = type(records[0])
    write(tmp_path, records)
    path = record_path(tmp_path, record_type)
    raw = path.read_bytes()
    for length in range(len(raw) + 1):
        path.write_bytes(raw[:length])
        survived = read_records(tmp_path, record_type)
        assert survived == records[: len(survived)]
        num_lines = raw[:length].count(b"\n")
        assert len(survived) == max(0, num_lines - (record_type is UpdateRecord))
        write(tmp_path, records[3:])
        assert read_records(tmp_path, record_type) == survived + records[3:]


def test_a_character_cut_in_two_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, [MetricRecord(0, 1, 1, 0.0, "größe", 1.0)])
    path = record_path(tmp_path, MetricRecord)
    path.write_bytes(path.read_bytes() + "0,1,1,0.0,grö".encode()[:-1])
    assert [record.name for record in read_records(tmp_path, MetricRecord)] == ["größe"]


@pytest.mark.parametrize(
    ("record_type", "line"),
    [
        (UpdateRecord, b"0,1,2\n"),
        (UpdateRecord, b"0,1,2,3,4,5\n"),
        (UpdateRecord, b"0,1,2,3,x\n"),
        (UpdateRecord, b"\xff\n"),
        (EventRecord, b'{"name": "ready"\n'),
        (EventRecord, b'{"name": "ready"}\n'),
        (EventRecord, b"[]\n"),
    ],
)
def test_a_damaged_line_is_reported_with_its_place(record_type: type[Any], line: bytes, tmp_path: Path) -> None:
    write(tmp_path, UPDATES[:2] + EVENTS[:2])
    path = record_path(tmp_path, record_type)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(UsageError, match=rf"{record_type.kind}\.\w+: entry 3 is no record"):
        read_records(tmp_path, record_type)


def test_truncating_keeps_what_came_before(tmp_path: Path) -> None:
    write(tmp_path, [*UPDATES, *EVENTS, STEP])
    torn = record_path(tmp_path, UpdateRecord)
    torn.write_bytes(torn.read_bytes() + b"0,1,")
    truncate(tmp_path, iteration=3)
    assert read_records(tmp_path, UpdateRecord) == UPDATES[:3]
    assert read_records(tmp_path, EventRecord) == EVENTS[:3]
    assert read_records(tmp_path, StepRecord) == [STEP]
    write(tmp_path, UPDATES[4:])
    assert read_records(tmp_path, UpdateRecord) == [*UPDATES[:3], UPDATES[4]]
    truncate(tmp_path, iteration=0)
    assert [read_records(tmp_path, record_type) for record_type in (UpdateRecord, EventRecord, StepRecord)] == [[]] * 3
    assert not list(tmp_path.glob(".*")), "nothing else is left in the directory"


def test_truncating_a_damaged_directory_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, [*UPDATES, *EVENTS])
    record_path(tmp_path, EventRecord).write_bytes(b"nonsense\n")
    with pytest.raises(UsageError):
        truncate(tmp_path, iteration=1)
    assert read_records(tmp_path, UpdateRecord) == UPDATES


@pytest.mark.parametrize(
    "data", [[], ["steps"], ["steps", 1, 2], ["nothing", 1], [None], [[]], [{}, 1], [*to_plain(STEP), 1]]
)
def test_plain_data_that_is_no_record(data: list[Any]) -> None:
    with pytest.raises(ValueError, match="not a record"):
        from_plain(data)


def test_summarise() -> None:
    assert summarise({"accuracy": 0.95333, "loss": 17.0}) == "accuracy 0.9533, loss 17"


@given(records=st.lists(RECORDS[StepRecord], max_size=5))
def test_packed_steps_are_the_same_steps(records: list[StepRecord]) -> None:
    packed = pack_steps(records)
    assert unpack_steps(packed) == records
    with pytest.raises(ValueError, match="no step records"):
        unpack_steps(packed + b"x")


@pytest.mark.parametrize("name", ["loss", "größe", "a,b", 'say "x"', "val/loss", ""])
def test_metrics_of_any_name_read_back(name: str, tmp_path: Path) -> None:
    record = MetricRecord(0, 1, 1, 1 / 3, name, 2 / 3)
    write(tmp_path, [record])
    assert read_records(tmp_path, MetricRecord) == [record]
