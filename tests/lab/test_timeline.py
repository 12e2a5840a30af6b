"""A run's trace: slices that add up to its steps, updates at the steps that caused them."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.errors import UsageError
from paceline.lab import trace as timeline
from paceline.records import EvaluationRecord, EventRecord, Record, RecordWriter, StepRecord, UpdateRecord


def step(
    worker: int, number: int, ends_s: float, *, parts: tuple[float, float, float], hidden_s: float = 0.0
) -> Record:
    compute_s, communication_s, waiting_s = parts
    return StepRecord(
        worker, number, 2 * number, ends_s, 32, compute_s, communication_s, waiting_s, 1000, worker, hidden_s
    )


RECORDS: list[Record] = [
    step(0, 1, 0.010, parts=(0.006, 0.003, 0.001), hidden_s=0.002),
    step(1, 1, 0.012, parts=(0.012, 0.0, 0.0)),
    step(0, 2, 0.030, parts=(0.012, 0.004, 0.004)),
    UpdateRecord(0, 1, 0, 0, 0),
    UpdateRecord(1, 2, 1, 0, 1),
    UpdateRecord(0, 3, 0, 1, 0),
    UpdateRecord(0, 4, 0, 2, 0),  # of a step that was never recorded
    EvaluationRecord(2, 0.030, 96, {"accuracy": 0.5}, 0.1),
    EventRecord("target_reached", "run", 2, 0.030, {}),
]


def save(directory: Path, records: list[Record]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps({"strategy": {"name": "ps-asp"}}))
    writer = RecordWriter(directory)
    writer.write(records)
    writer.close()
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save(tmp_path / "run", RECORDS)


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def process_of(events: list[dict[str, Any]], name: str) -> int:
    (found,) = [
        e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name" and e["args"]["name"] == name
    ]
    return int(found)


def slices(events: list[dict[str, Any]], process: str, *, thread: int = 0) -> list[tuple[str, float, float]]:
    pid = process_of(events, process)
    return [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, thread)]


def test_a_workers_slices_are_its_steps_end_to_end(run: Path) -> None:
    events = read(timeline.write(run)[0])
    assert slices(events, "worker 0") == [
        ("compute", 0.0, 6000.0),
        ("waiting", 6000.0, 1000.0),
        ("exchange", 7000.0, 3000.0),
        ("compute", 10000.0, 12000.0),
        ("waiting", 22000.0, 4000.0),
        ("exchange", 26000.0, 4000.0),
    ]
    assert slices(events, "worker 1") == [("compute", 0.0, 12000.0)]


def test_hidden_exchange_lies_behind_the_end_of_compute(run: Path) -> None:
    assert slices(read(timeline.write(run)[0]), "worker 0", thread=1) == [("exchange behind compute", 4000.0, 2000.0)]


def updates(events: list[dict[str, Any]], server: int) -> list[tuple[int, float, int]]:
    """Worker, microseconds and staleness of each."""
    pid = process_of(events, f"server {server}")
    return [
        (e["args"]["worker"], e["ts"], e["args"]["staleness"]) for e in events if e["ph"] == "i" and e["pid"] == pid
    ]


def test_an_update_stands_where_the_step_ended_that_caused_it(run: Path) -> None:
    events = read(timeline.write(run)[0])
    assert updates(events, 0) == [(0, 10000.0, 0), (0, 30000.0, 0)]
    assert updates(events, 1) == [(1, 12000.0, 1)]


def test_updates_find_their_steps_whatever_was_skipped_and_where_clocks_begin_anew(tmp_path: Path) -> None:
    """The second of worker 0's steps gave no gradient; before the fourth the run was resumed."""
    steps = [
        StepRecord(0, number, number, number * 0.01, 32, 0.01, 0.0, 0.0, 0, staleness, 0.0)
        for number, staleness in enumerate((0, -1, 0, 0, 0), 1)
    ]
    clocks = (0, 2, 0, 1)
    applied = [UpdateRecord(0, number, 0, clock, 0) for number, clock in enumerate(clocks, 1)]
    events = read(timeline.write(save(tmp_path / "run", [*steps, *applied]))[0])
    assert [at_us for _, at_us, _ in updates(events, 0)] == [10000.0, 30000.0, 40000.0, 50000.0]


def test_evaluations_and_events_are_marked(run: Path) -> None:
    events = read(timeline.write(run)[0])
    marks = {e["name"]: e for e in events if e["ph"] == "i" and e["pid"] == process_of(events, "run")}
    assert marks["evaluation"]["ts"] == 30000.0
    assert marks["evaluation"]["args"] == {"iteration": 2, "accuracy": 0.5}
    assert marks["target_reached"]["ts"] == 30000.0


def test_slices_of_a_line_never_overlap_whatever_the_rounding(tmp_path: Path) -> None:
    records, ends_s = [], 0.0
    for number in range(1, 200):
        parts = (0.001 + number * 1e-7 / 3, 1e-6 / 7, 2e-6 / 9)
        ends_s += sum(parts)
        records.append(step(0, number, ends_s, parts=parts))
    found = slices(read(timeline.write(save(tmp_path / "run", records))[0]), "worker 0")
    for (_, at, length), (_, following, _) in pairwise(found):
        assert at + length <= following + 2.0  # microseconds: what the records' own rounding leaves


def test_a_window_holds_the_steps_that_end_in_it_and_what_belongs_to_them(run: Path) -> None:
    path, window = timeline.write(run, begin_s=0.011, end_s=0.03)
    events = read(path)
    assert [name for name, _, _ in slices(events, "worker 0")] == ["compute", "waiting", "exchange"]
    assert len(slices(events, "worker 1")) == 1
    assert updates(events, 0) == [(0, 30000.0, 0)]
    assert updates(events, 1) == [(1, 12000.0, 1)]
    assert (window.num_drawn, window.num_left_out) == (2, 0)
    assert [e["name"] for e in read(timeline.write(run, begin_s=1.0)[0])] == ["process_name"]


def test_no_more_steps_than_a_browser_shows_and_so_it_says(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeline, "MAX_STEPS", 2)
    monkeypatch.setattr(sys, "argv", ["paceline", "timeline", str(run)])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.strip() == (
        f"{run / 'timeline.json.gz'} (the first 2 of 3 steps; for others choose a window of the training time)"
    )
    events = read(run / "timeline.json.gz")
    assert len(slices(events, "worker 0")) == 3
    assert updates(events, 0) == [(0, 10000.0, 0)]


def test_a_metric_that_is_no_number_leaves_the_trace_readable(tmp_path: Path) -> None:
    records = [EvaluationRecord(2, 0.03, 96, {"loss": float("nan"), "other": float("inf")}, 0.1)]
    path, _ = timeline.write(save(tmp_path / "run", records))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    events = json.loads(gzip.decompress(path.read_bytes()), parse_constant=refuse)["traceEvents"]
    assert events[-1]["args"] == {"iteration": 2, "loss": "nan", "other": "inf"}


def test_a_run_of_any_length_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_STEPS", 100)
    records = [step(0, number, number * 0.01, parts=(0.01, 0.0, 0.0)) for number in range(1, 20_001)]
    directory = save(tmp_path / "run", records)
    num_bytes = (directory / "steps.csv").stat().st_size
    del records
    tracemalloc.start()
    _, window = timeline.write(directory)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert window.num_left_out == 19_900
    assert num_bytes > 1_000_000
    assert peak_bytes < num_bytes / 2


def test_a_run_without_a_step_has_a_trace(tmp_path: Path) -> None:
    events = read(timeline.write(save(tmp_path / "run", [EventRecord("failed", "run", 0, 0.0, {})]))[0])
    assert [e["name"] for e in events] == ["process_name", "failed"]


def test_the_command_says_where_it_wrote(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plain.json"
    for arguments, path in (([str(run)], run / "timeline.json.gz"), ([str(run), "--out", str(out)], out)):
        monkeypatch.setattr(sys, "argv", ["paceline", "timeline", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        assert capsys.readouterr().out.strip() == str(path)
    assert json.loads(out.read_text())["otherData"]["strategy"] == "ps-asp"


def test_refusals_name_the_culprit(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere is no result directory"):
        timeline.write(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="a timeline from 3 s to 2 s is empty"):
        timeline.write(run, begin_s=3, end_s=2)
    with pytest.raises(UsageError, match=r"cannot write the timeline .*No such file or directory"):
        timeline.write(run, tmp_path / "missing" / "t.json")
