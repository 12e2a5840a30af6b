"""What is shown of a run that is under way, on terminals of any width and without one."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paceline
from paceline.config import RunConfig
from paceline.data import files
from paceline.engines.standing import Progress
from paceline.records import EventRecord
from paceline.running import launch, watching

LABELS = ["all-reduce x 128", "12/90 ps-bsp:servers=2:combine=server x 16 seed 0"]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("max_steps", [None, 1_000_000])
@pytest.mark.parametrize("width", [80, 200])
def test_progress_does_not_wrap_and_keeps_what_matters(width: int, max_steps: int | None, label: str) -> None:
    console = Console(force_terminal=True, width=width, file=io.StringIO())
    line = watching.ProgressLine(console, label, RunConfig(max_steps=max_steps), outlook=lambda: "12 min left")
    busy = Progress(
        iteration=87_654, time_s=12_345.6, samples=10**10, compute_s=1.0, communication_s=98.0, waiting_s=1.0,
        metrics={"accuracy": 0.123456}, phase="training",
    )  # fmt: skip
    with line:
        time.sleep(2 * watching._REFRESH_S)
        line.on_progress(busy)
        lines = console.render_lines(line._renderable())
    texts = ["".join(segment.text for segment in segments) for segments in lines]
    assert len(texts) == (1 if width == 200 else 2)
    assert all(len(text) == width for text in texts)
    assert label in texts[0]
    assert re.search(r" \d:\d\d:\d\d", texts[0])
    assert "step 87654  12 min left  810,005 samples/s  accuracy 0.1235" in texts[-1]
    assert "…" not in "".join(texts)
    assert ("waiting 1%" in texts[-1]) == (width == 200)


def test_a_fact_that_does_not_fit_is_left_out_whole() -> None:
    console = Console(force_terminal=True, width=80, file=io.StringIO())
    metrics = {"accuracy": 0.123456, "validation_loss_of_the_mean_of_all": 1234567.0, "another": 1.0}
    with watching.ProgressLine(console, "x", RunConfig()) as line:
        time.sleep(2 * watching._REFRESH_S)
        line.on_progress(Progress(iteration=7, time_s=2.0, samples=600, metrics=metrics, phase="training"))
        ((*segments,),) = console.render_lines(line._renderable())
    text = "".join(segment.text for segment in segments)
    assert "step 7  300 samples/s" in text
    assert "accuracy" not in text


def test_without_a_terminal_progress_is_plain_lines(monkeypatch) -> None:
    monkeypatch.setattr(watching, "_PLAIN_INTERVAL_S", 0.0)
    stream = io.StringIO()
    with watching.ProgressLine(Console(file=stream), "ps-bsp x 2", RunConfig()) as line:
        line.on_progress(Progress())
        line.on_progress(Progress(iteration=7, time_s=2.0, samples=600, metrics={"loss": 0.5}, phase="training"))
        line.on_output("worker-1", "hello [bold]you[/bold] " + "x" * 200)
        print("(raylet) a notice of Ray's")
    assert stream.getvalue().splitlines() == [
        "ps-bsp x 2: starting",
        "ps-bsp x 2: step 7  300 samples/s  loss 0.5",
        "[worker-1] hello [bold]you[/bold] " + "x" * 200,
    ]


def happened(name: str, **details: Any) -> EventRecord:
    return EventRecord(name, "run", 0, 0.0, details)


def test_the_line_says_how_many_workers_there_are_now(monkeypatch) -> None:
    """Of an elastic run; the label goes on to say how many it began with."""
    monkeypatch.setattr(watching, "_PLAIN_INTERVAL_S", 0.0)
    stream, progress = io.StringIO(), Progress()
    joins = happened("reformed", ranks=[0, 2, 3, 4], joined=[3, 4])
    for_good = happened("left", left=3)
    host_of_a_static_run = happened("lost", host="host-1", members=["worker-1"])
    with watching.ProgressLine(Console(file=stream), "ps-asp x 3", RunConfig()) as line:
        for event in (happened("training"), host_of_a_static_run, happened("lost", left=2), joins, for_good):
            progress.take([event])
            line.on_progress(Progress.from_json(progress.to_json()))  # `paceline attach` gets it so
    shown = ["step 0", "step 0", "step 0  now x 2", "step 0  now x 4", "step 0  now x 3"]
    assert stream.getvalue().splitlines() == [f"ps-asp x 3: {facts}" for facts in shown]


# --- from Python -----------------------------------------------------------------------------------------------------


def greet() -> None:
    worker = paceline.init()
    print(f"hello from {worker.rank}")


def shown_of_a_run(monkeypatch: pytest.MonkeyPatch, out: Path, *, stdout_is_terminal: bool, **console: bool) -> str:
    """What goes to the console while a function is run that nobody watches."""
    stream = io.StringIO()
    monkeypatch.setattr(launch, "Console", lambda stderr: Console(file=stream, width=200, **console))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: stdout_is_terminal)
    paceline.run(greet, engine="virtual", cluster="lab-1gbe", workers=2, out=out)
    return stream.getvalue()


def test_on_a_terminal_a_run_from_python_shows_its_progress(monkeypatch, capsys, tmp_path: Path) -> None:
    shown = shown_of_a_run(monkeypatch, tmp_path / "run", stdout_is_terminal=True, force_terminal=True)
    assert "all-reduce x 2" in shown
    assert "hello from 1" in shown
    assert capsys.readouterr().out == ""


def test_in_a_notebook_it_does_so_too(monkeypatch, tmp_path: Path) -> None:
    displayed: list[object] = []
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: displayed.append(text))
    shown_of_a_run(monkeypatch, tmp_path / "run", stdout_is_terminal=False, force_jupyter=True)
    assert any("hello from 1" in str(text) for text in displayed)


@pytest.mark.parametrize("stderr_is_terminal", [False, True])
def test_where_output_goes_to_a_file_it_is_what_scripts_print(
    stderr_is_terminal: bool, monkeypatch, capsys, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert not shown_of_a_run(monkeypatch, out, stdout_is_terminal=False, force_terminal=stderr_is_terminal)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[worker-0] hello from 0", "[worker-1] hello from 1"]


class Bare:
    """A stream that can do nothing but what printing needs."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Bare(), closed()], ids=["none", "bare", "closed"])
def test_streams_that_are_no_files_are_no_terminals(stream: Any, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    assert not watching.is_terminal(stream)
    assert not watching.is_seen(Console(file=io.StringIO(), force_terminal=True))


def test_a_program_without_standard_output_trains(monkeypatch, tmp_path: Path) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    paceline.run(greet, engine="virtual", cluster="lab-1gbe", workers=2, out=tmp_path / "run")
    bar = files._Progress("a download")
    bar.total = 7
    bar.close()


def test_scripts_print_to_an_object_of_the_programs_own(monkeypatch, tmp_path: Path) -> None:
    own = Bare()
    monkeypatch.setattr(sys, "stdout", own)
    paceline.run(greet, engine="virtual", cluster="lab-1gbe", workers=2, out=tmp_path / "run")
    assert sorted(own.written.splitlines()) == ["[worker-0] hello from 0", "[worker-1] hello from 1"]
