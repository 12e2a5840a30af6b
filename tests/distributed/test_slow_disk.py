"""A launcher whose disk is slow or full: a real controller and a real line, and no run."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from paceline.elastic import Elastic
from paceline.engines.ray.control import ControlLine
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.record_writing import RecordWriting
from paceline.engines.ray.survival import Survival
from paceline.errors import RunFailed
from paceline.membership import Membership
from paceline.messages import Kind
from paceline.records import (
    EvaluationRecord,
    EventRecord,
    MetricRecord,
    Record,
    RecordWriter,
    Row,
    read_records,
)

PATIENCE_S = 60.0


class Gate:
    """Whoever writes records to the disk waits here until it is opened."""

    def __init__(self) -> None:
        self.is_waited_for, self.opens = threading.Event(), threading.Event()
        self.is_given_up = False

    def wait(self) -> None:
        self.is_waited_for.set()
        self.is_given_up = self.is_given_up or not self.opens.wait(PATIENCE_S / 4)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, flush = Gate(), RecordWriter.flush

    def slow(writer: RecordWriter) -> None:
        gate.wait()
        flush(writer)

    monkeypatch.setattr(RecordWriter, "flush", slow)
    yield gate
    gate.opens.set()


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path, host="127.0.0.1", epoch=1, on_output=lambda who, line: None)


def line_to(controller: Controller) -> ControlLine:
    return ControlLine(controller.address, identity="worker-1", progress=lambda: 1, on_abort=lambda reason: None)


def turn_until(controller: Controller, is_so: Callable[[], object]) -> bool:
    until_s = time.monotonic() + PATIENCE_S / 2
    while not is_so() and time.monotonic() < until_s:
        controller.turn(timeout_s=0.05)
    return bool(is_so())


def close(line: ControlLine, controller: Controller) -> None:
    closing = threading.Thread(target=line.close)
    closing.start()
    assert turn_until(controller, lambda: not closing.is_alive())
    controller.close()


def event(number: int) -> EventRecord:
    return EventRecord("number", "worker-1", number, 0.0, {})


def test_members_are_heard_while_the_disk_is_slow(tmp_path: Path, controller: Controller, gate: Gate) -> None:
    """A report that a worker has stopped, behind records of which the disk has not taken the first."""
    line = line_to(controller)
    line.emit(event(0))
    assert turn_until(controller, gate.is_waited_for.is_set)
    line.emit(event(1))
    line.tell(Kind.REPORT, {"rank": 1})
    assert turn_until(controller, lambda: controller.words)
    assert not gate.is_given_up
    gate.opens.set()
    line.close()
    controller.close()
    assert [each.iteration for each in read_records(tmp_path, EventRecord)] == [0, 1]


def test_what_was_recorded_before_a_checkpoint_is_there_when_that_is(
    tmp_path: Path, controller: Controller, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has come to its end meanwhile says what is not there."""
    monkeypatch.setattr("paceline.engines.ray.controller._STILL_S", 0.6)
    line = line_to(controller)
    line.emit(event(0))
    saving = threading.Thread(target=line.save, args=("checkpoint.pt", b"content"))
    saving.start()
    assert turn_until(controller, gate.is_waited_for.is_set)
    with pytest.raises(RunFailed, match=f"records are not written in {tmp_path}: its disk has taken nothing for 1 s"):
        controller.finish_records()
    assert not (tmp_path / "checkpoint.pt").exists()
    gate.opens.set()
    assert turn_until(controller, lambda: not saving.is_alive())
    assert [each.iteration for each in read_records(tmp_path, EventRecord)] == [0]
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"content"
    line.close()
    controller.close()


def test_a_full_disk_is_said(tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run has ended before it is found."""

    def full(writer: RecordWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "flush", full)
    controller.raise_write_error()
    controller.event("number")
    for say in (controller.finish_records, controller.raise_write_error):
        with pytest.raises(RunFailed, match=f"cannot write records: No space left on device in {tmp_path}"):
            say()
    controller.close()


def test_records_wait_for_a_disk_that_stands_still_and_none_is_lost(tmp_path: Path, gate: Gate) -> None:
    """In a queue that has an end, so that memory does not fill up."""
    writing, put = RecordWriting(tmp_path, most=3), []

    def record() -> None:
        for number in range(1, 20):
            writing.put([event(number)])
            put.append(number)

    writing.put([event(0)])
    assert gate.is_waited_for.wait(PATIENCE_S)
    thread = threading.Thread(target=record)
    thread.start()
    thread.join(1.0)
    assert put == [1, 2, 3]
    gate.opens.set()
    thread.join(PATIENCE_S)
    assert writing.close(limit_s=PATIENCE_S)
    assert [each.iteration for each in read_records(tmp_path, EventRecord)] == list(range(20))


@pytest.mark.parametrize(
    "record",
    [
        MetricRecord("one", 0, 1, 0.0, "loss", 1.0),  # type: ignore[arg-type]
        MetricRecord(float("inf"), 0, 1, 0.0, "loss", 1.0),  # type: ignore[arg-type]
        MetricRecord(1, 0, 1, 0.0, 1.0, 1.0),  # type: ignore[arg-type]
        EvaluationRecord([1], 0.0, 1, {}, 0.0),  # type: ignore[arg-type]
    ],
    ids=["a word for a number", "an infinite number", "a number for a name", "a list for a number"],
)
def test_a_members_record_that_cannot_be_written_is_refused_and_the_run_goes_on(
    tmp_path: Path, controller: Controller, record: Record
) -> None:
    """Over the wire what a member says may be of any type."""

    def told(*names: str) -> bool:
        controller.finish_records()
        return [each.name for each in read_records(tmp_path, EventRecord)] == [*names]

    line = line_to(controller)
    for each in (event(0), record):
        line.emit(each)
    assert turn_until(controller, lambda: told("number", "refused"))
    line.emit(event(1))
    assert turn_until(controller, lambda: told("number", "refused", "number"))
    controller.raise_write_error()
    close(line, controller)
    assert [each.who for each in read_records(tmp_path, EventRecord)] == ["worker-1"] * 3
    assert not read_records(tmp_path, MetricRecord)
    assert not read_records(tmp_path, EvaluationRecord)


def test_a_disk_that_stands_still_holds_up_the_end_of_a_run_no_longer_than_said(
    tmp_path: Path,
    controller: Controller,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("paceline.engines.ray.controller._LAST_S", 0.5)
    controller.event("number")
    assert gate.is_waited_for.wait(PATIENCE_S)
    began_s = time.monotonic()
    controller.close()
    assert time.monotonic() - began_s < PATIENCE_S / 6
    assert f"records are not yet written in {tmp_path} after 0 s, and given up" in capsys.readouterr().err
    assert not gate.is_given_up


def test_waiting_for_records_has_an_end_also_where_no_more_fit(tmp_path: Path, gate: Gate) -> None:
    writing = RecordWriting(tmp_path, most=1)
    writing.put([event(0)])
    assert gate.is_waited_for.wait(PATIENCE_S)
    writing.put([event(1)])
    began_s = time.monotonic()
    assert not writing.wait(still_s=0.2)
    assert not writing.close(limit_s=0.2)
    assert time.monotonic() - began_s < PATIENCE_S / 6
    assert not gate.is_given_up
    gate.opens.set()
    assert writing.wait(still_s=PATIENCE_S)
    assert writing.close(limit_s=PATIENCE_S)
    assert [each.iteration for each in read_records(tmp_path, EventRecord)] == [0, 1]


def test_a_disk_that_takes_little_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than one that takes nothing."""
    append = RecordWriter.append

    def slowly(writer: RecordWriter, rows: Sequence[Row]) -> None:
        time.sleep(0.3)
        append(writer, rows)

    monkeypatch.setattr(RecordWriter, "append", slowly)
    writing = RecordWriting(tmp_path)
    for number in range(6):
        writing.put([event(number)])
    assert writing.wait(still_s=1.2)
    assert [each.iteration for each in read_records(tmp_path, EventRecord)] == list(range(6))
    assert writing.close(limit_s=PATIENCE_S)


def test_nobody_is_ended_for_pulses_that_the_launcher_has_not_read_yet(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message takes as long as where the disk's queue is full, so that turns break off."""
    survival = Survival(
        Elastic(at_least=1, at_most=2, deadline_s=1.0),
        controller,
        membership=Membership.first(2),
        deadline_s=60.0,
        pids={},
        elsewhere={"worker-0", "worker-1"},
        say=lambda line: None,
    )
    controller.progress.phase = "training"
    controller.gone.add("worker-0")
    line = line_to(controller)
    assert turn_until(controller, lambda: "worker-1" in controller.heard_s)
    survival.end_silent()
    monkeypatch.setattr(Controller, "_take", lambda controller, name, frames: time.sleep(0.6))
    for number in range(4):
        line.emit(event(number))
        time.sleep(0.5)
        controller.turn(timeout_s=0.0)
        assert not controller.has_heard_all
        survival.end_silent()
    assert not controller.expelled
    monkeypatch.undo()
    assert turn_until(controller, lambda: controller.has_heard_all)
    close(line, controller)
