"""What the command line shows of a study: its progress, and its table."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from paceline.cli import tables
from paceline.engines.standing import Progress
from paceline.lab.progress import StudyProgress
from paceline.lab.runner import Position, TrialOutcome
from paceline.lab.tracking import Tracking
from paceline.lab.virtual_cluster import VirtualCluster
from paceline.running import watching
from tests.lab.made import reaching, spec, study


def test_the_table_of_a_study_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    trials = {
        ("all-reduce", 1, 0): reaching(424.0),
        ("all-reduce", 1, 1): reaching(474.0),
        ("all-reduce", 16, 0): reaching(41.0, samples_per_step=123_456),
        ("all-reduce", 16, 1): reaching(43.0, samples_per_step=123_456),
        ("ps-bsp:servers=2", 1, 0): reaching(1.0, value=0.2),
        ("ps-bsp:servers=2", 16, 0): reaching(1.0, failure="no"),
    }
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(tables.of_study(study(tmp_path / "s", trials).frames))
    lines = [line.rstrip() for line in console.export_text().splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == [
        "strategy",
        "workers",
        "seeds",
        "to",
        "target,",
        "s",
        "speed-up",
        "samples/s",
        "cost,",
        "s",
    ]
    rows = [" ".join(line.split()) for line in lines[2:]]
    assert rows == [
        "all-reduce 1 2/2 449 (424-474) 1.0 1 449",
        "all-reduce 16 2/2 42 (41-43) 10.7 (10.3-11.0) 470,575 672",
        "ps-bsp:servers=2 1 0/1 never - 320 -",
        "ps-bsp:servers=2 16 0 failed - - -",
    ]


def test_short_virtual_times_leave_strategies_room_for_their_names(tmp_path: Path) -> None:
    trials = {
        ("all-reduce", 1, 0): reaching(0.05108),
        ("all-reduce", 1, 1): reaching(0.05704),
        ("all-reduce", 2, 0): reaching(0.08161, samples_per_step=12_345),
        ("all-reduce", 2, 1): reaching(0.08394, samples_per_step=12_345),
    }
    virtual = {"engine": "virtual", "cluster": VirtualCluster.read("lab-1gbe")}
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(tables.of_study(study(tmp_path / "s", trials, **virtual).frames))
    lines = [line.rstrip() for line in console.export_text().splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert [line.split()[:5] for line in lines[-2:]] == [
        ["all-reduce", "1", "2/2", "0.054", "(0.051-0.057)"],
        ["all-reduce", "2", "2/2", "0.083", "(0.082-0.084)"],
    ]


def test_a_studys_progress_says_which_run_and_how_long_the_rest_takes(monkeypatch) -> None:
    monkeypatch.setattr(watching, "_PLAIN_INTERVAL_S", 0.0)
    stream = io.StringIO()
    made = spec(strategies=("ps-bsp",), workers=(1, 2), seeds=(0, 1))
    shown = StudyProgress(Console(file=stream), made, "s", tracking=Tracking(), timelines=False)
    busy = Progress(iteration=7, time_s=2.0, samples=600, metrics={"accuracy": 0.5}, phase="training")
    with shown.trial(made.trials[0], Position(1, 4, None)) as line:
        line.on_progress(busy)
    with shown.trial(made.trials[1], Position(2, 4, 200.0)) as line:
        line.on_progress(busy)
    shown.on_outcome(made.trials[1], Position(2, 4, 200.0), TrialOutcome("failed", "no\nmore", 1.0), Path("nowhere"))
    assert stream.getvalue().splitlines() == [
        "1/4 ps-bsp x 1 seed 0: step 7  300 samples/s  accuracy 0.5",
        "2/4 ps-bsp x 2 seed 0: step 7  3 min 20 s left  300 samples/s  accuracy 0.5",
        "2/4 ps-bsp x 2 seed 0: failed: no",
        "more",
    ]


def test_a_studys_runs_are_told_apart_from_another_studys_at_a_service(tmp_path: Path) -> None:
    made = spec(strategies=("ps-bsp",), workers=(1,))
    tracking = Tracking(tensorboard=tmp_path / "events")
    shown = StudyProgress(Console(file=io.StringIO()), made, "digits", tracking=tracking, timelines=False)
    with shown.trial(made.trials[0], Position(1, 1, None)):
        pass
    (events,) = (tmp_path / "events").rglob("events.out.tfevents.*")
    assert events.parent == tmp_path / "events" / "digits" / "ps-bsp-n1-s0"
    written = events.read_bytes()
    assert b"/somewhere/train.py" in written
    assert b"accuracy=0.5" in written


def test_what_cannot_be_shown_of_a_trial_does_not_end_the_study(tmp_path: Path) -> None:
    directory = study(tmp_path / "s", {("ps-bsp", 1, 0): reaching(1.0)}).directory / "trials" / "ps-bsp-n1-s0"
    (directory / "manifest.json").write_text("{}")  # lacks what a timeline begins with
    stream = io.StringIO()
    made = spec(strategies=("ps-bsp",), workers=(1,))
    shown = StudyProgress(Console(file=stream), made, "s", tracking=Tracking(), timelines=True)
    shown.on_outcome(made.trials[0], Position(1, 1, None), TrialOutcome("finished", "", 1.0), directory)
    assert stream.getvalue().splitlines() == [
        "1/1 ps-bsp x 1 seed 0: accuracy 0.5 after 1.0 s",
        "1/1 ps-bsp x 1 seed 0: KeyError: 'strategy'",
    ]
