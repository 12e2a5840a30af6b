"""A launcher whose disk is slow or full: a real controller and a real line, and no run."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.engines.ray.control import ControlLine
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.record_writing import RecordWriting
from paceline.errors import RunFailed
from paceline.messages import Kind
from paceline.records import EventRecord, RecordWriter, read_records

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
    tmp_path: Path, controller: Controller, gate: Gate
) -> None:
    line = line_to(controller)
    line.emit(event(0))
    saving = threading.Thread(target=line.save, args=("checkpoint.pt", b"content"))
    saving.start()
    assert turn_until(controller, gate.is_waited_for.is_set)
    assert not controller.finish_records(limit_s=0.5)
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
    assert controller.finish_records(limit_s=PATIENCE_S)
    with pytest.raises(RunFailed, match=f"cannot write records: No space left on device in {tmp_path}"):
        controller.raise_write_error()
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
    writing.close()
    assert [each.iteration for each in read_records(tmp_path, EventRecord)] == list(range(20))


def test_a_record_that_cannot_be_written_is_said_and_holds_up_no_other(tmp_path: Path) -> None:
    writing = RecordWriting(tmp_path)
    writing.put([EventRecord("number", "worker-1", 0, 0.0, {"details": object()})])
    writing.put([event(1)])
    assert writing.mark().wait(PATIENCE_S)
    assert "not JSON serializable" in str(writing.error)
    writing.close()
    assert [each.iteration for each in read_records(tmp_path, EventRecord)] == [1]
