"""What is asked of a run from another terminal, what `paceline runs` says of each, and what `attach` shows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.runs import state_of
from paceline.cli.scale import directory_of
from paceline.engines import requests
from paceline.engines.requests import Desk, ask, is_under_way, launcher_of
from paceline.engines.standing import Progress
from paceline.errors import UsageError
from paceline.running import resuming
from paceline.running.result import Result


@contextmanager
def desk_in(directory: Path, answer):
    desk, is_over = Desk(directory, answer), threading.Event()

    def serve() -> None:
        while not is_over.wait(0.01):
            desk.turn()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield desk
    finally:
        is_over.set()
        thread.join()
        desk.close()


@pytest.mark.parametrize("is_guard", [False, True])
def test_nobody_else_goes_on_in_the_directory_of_a_run(tmp_path: Path, is_guard: bool, monkeypatch) -> None:
    requests.require_alone(tmp_path)
    desk = Desk(tmp_path, answered, is_guard=is_guard)
    try:
        with pytest.raises(UsageError, match="a run is under way in"):
            requests.require_alone(tmp_path)
        monkeypatch.setattr(os, "getppid", os.getpid)  # as the guard's own launcher
        with nullcontext() if is_guard else pytest.raises(UsageError):
            requests.require_alone(tmp_path)
    finally:
        desk.close()


def answered(request):
    if request["do"] != "scale":
        raise UsageError("no such thing")
    return f"{request['workers']} workers"


def test_a_request_is_answered_or_refused_in_words_whatever_path_leads_there(tmp_path, monkeypatch) -> None:
    with desk_in(tmp_path, answered):
        assert is_under_way(tmp_path)
        assert ask(tmp_path, {"do": "scale", "workers": 3}) == "3 workers"
        monkeypatch.chdir(tmp_path.parent)
        assert ask(Path(tmp_path.name), {"do": "scale", "workers": 4}) == "4 workers"
        with pytest.raises(UsageError, match="no such thing"):
            ask(tmp_path, {"do": "else"})
    assert not is_under_way(tmp_path)
    with pytest.raises(UsageError, match="it has ended, or was started on another host"):
        ask(tmp_path, {"do": "scale", "workers": 3})


def test_what_is_no_request_keeps_nobody_from_asking(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(requests, "_PATIENCE_S", 0.05)
    with desk_in(tmp_path, answered):
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for stranger, words in zip(strangers, (b"", b"no json\n", b"[1]\n"), strict=True):
            stranger.connect(requests._name(tmp_path))
            stranger.sendall(words)
        assert ask(tmp_path, {"do": "scale", "workers": 1}) == "1 workers"
        for stranger in strangers:
            stranger.close()


def test_other_users_are_sent_away(tmp_path: Path, monkeypatch) -> None:
    with desk_in(tmp_path, answered):
        monkeypatch.setattr(requests, "_user_of", lambda connection: os.geteuid() + 1)
        assert not is_under_way(tmp_path)
        with pytest.raises(UsageError, match="is another user's"):
            ask(tmp_path, {"do": "scale", "workers": 1})


def write_run(directory: Path, names=()) -> None:
    manifest = {"strategy": {"name": "all-reduce"}, "num_workers": 2, "config": {"max_steps": None}}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    events = [{"name": name, "who": "run", "iteration": 1, "time_s": 0.0, "details": {}} for name in names]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize(
    ("names", "files", "state"),
    [
        ([], ["model.safetensors"], "ended"),
        ([], [], "cut off"),
        (["failed"], [], "failed"),
        (["interrupted"], ["model.safetensors"], "interrupted"),
        (["started", "ended"], [], "ended"),
        (["started", "interrupted", "started", "ended"], ["model.safetensors"], "ended"),
        (["started", "interrupted", "started"], [], "cut off"),
        (["started", "ended", "started"], [], "cut off"),
    ],
)
def test_the_state_of_a_run(tmp_path: Path, names, files, state: str) -> None:
    write_run(tmp_path, names)
    for name in files:
        (tmp_path / name).touch()
    assert state_of(Result.open(tmp_path)) == state
    with desk_in(tmp_path, answered):
        assert state_of(Result.open(tmp_path)) == "under way"


def test_a_run_that_goes_on_has_no_model_of_its_end_before(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(resuming.checkpoint_files, "go_back", lambda *_, **__: None)
    resuming.drop_later(resuming.Found(str(tmp_path / "checkpoint.bin"), b"", SimpleNamespace(iteration=1)))
    write_run(tmp_path, ["started", "interrupted", "started"])
    assert state_of(Result.open(tmp_path)) == "cut off"


def test_runs_are_listed_and_found_by_name(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "mine"
    directory.mkdir(parents=True)
    (tmp_path / "runs" / "other").mkdir()
    manifest = {"strategy": {"name": "ps-bsp"}, "num_workers": 3, "started": "2026-01-01T00:00:00+00:00"}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert directory_of(Path("mine")) == Path("runs/mine")
    with pytest.raises(UsageError, match="none is no directory of a run"):
        directory_of(Path("none"))
    assert status_of(monkeypatch, "runs") == 0
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "cut off" in shown
    assert "ps-bsp" in shown
    assert "other" not in shown


def status_of(monkeypatch, *words: object) -> int:
    from paceline.cli import main

    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("names", "files", "status"),
    [([], ["model.safetensors"], 0), ([], [], 1), (["failed"], [], 1), (["interrupted"], [], 130)],
)
def test_attach_to_a_run_that_is_over_shows_its_last_words(tmp_path, monkeypatch, capsys, names, files, status) -> None:
    write_run(tmp_path, names)
    for name in files:
        (tmp_path / name).touch()
    (tmp_path / "output.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    assert status_of(monkeypatch, "attach", tmp_path) == status
    shown = capsys.readouterr().err.splitlines()
    assert 10 < len(shown) < 1000
    assert shown[-2] == "line 999"
    assert all(line.startswith("line ") for line in shown[:-1])


LAUNCHER = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from paceline.engines.requests import Desk
asked = []
def answer(request):
    asked.append(request)
    return ANSWER
desk, output = Desk(Path(sys.argv[1]), answer), Path(sys.argv[1], "output.txt").open("w", buffering=1)
print("ready", flush=True)
os.dup2(output.fileno(), 1)
until_s = time.monotonic() + 60
while len(asked) < 2 and time.monotonic() < until_s:
    desk.turn()
    time.sleep(0.01)
desk.close()
for number in range(3):
    output.write(f"word {number} of its ")
    time.sleep(0.1)
    output.write("end\\n")
"""


def test_attach_shows_a_run_to_the_end_of_its_process(tmp_path: Path, monkeypatch, capsys) -> None:
    """Its last words come after it has ceased to answer."""
    write_run(tmp_path)
    progress = Progress(iteration=7, time_s=2.0, phase="training", metrics={"loss": 0.5})
    code = LAUNCHER.replace("ANSWER", repr(progress.to_json()))
    launcher = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"ready\n"
    assert launcher_of(tmp_path) == launcher.pid
    monkeypatch.setattr("paceline.running.watching._PLAIN_INTERVAL_S", 0.0)
    assert status_of(monkeypatch, "attach", tmp_path) == 1
    shown = capsys.readouterr().err.splitlines()
    assert "all-reduce x 2: step 7  0 samples/s  loss 0.5" in shown
    assert shown[-4:] == [*(f"word {number} of its end" for number in range(3)), f"{tmp_path}: cut off"]
    assert launcher.wait(timeout=60) == 0


def test_attach_ends_with_a_run_whose_process_goes_on(tmp_path: Path, monkeypatch) -> None:
    """As a notebook's does, even where a detached run was in this directory before."""
    write_run(tmp_path)
    for name in ("output.txt", "model.safetensors"):
        (tmp_path / name).touch()
    asked = threading.Event()

    def answer(request) -> str:
        asked.set()
        return Progress().to_json()

    def serve() -> None:
        desk = Desk(tmp_path, answer)
        is_open.set()
        while not asked.is_set():
            desk.turn()
            time.sleep(0.01)
        desk.close()

    is_open, thread = threading.Event(), threading.Thread(target=serve)
    thread.start()
    assert is_open.wait(60.0)
    assert status_of(monkeypatch, "attach", tmp_path) == 0
    assert asked.is_set()
    thread.join()


def test_progress_is_the_same_after_its_way() -> None:
    progress = Progress(3, 1.5, 0.5, 96, 1.0, 0.25, 0.125, {"loss": 1e-30}, "training", "disk full")
    assert Progress.from_json(progress.to_json()) == progress


def test_who_detaches_hears_why_the_run_does_not_begin(tmp_path: Path) -> None:
    code = "import sys; from paceline.cli import main; sys.exit(main())"
    given = [sys.executable, "-c", code, "run", "missing.py", "--detach"]
    ended = subprocess.run(given, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert ended.returncode == 2
    assert "missing.py" in ended.stderr
    assert ended.stderr.count("error:") == 1


def test_simulated_runs_cannot_be_detached(monkeypatch, capsys) -> None:
    assert status_of(monkeypatch, "run", "missing.py", "--engine", "virtual", "--detach") == 2
    assert "--detach is for runs on real processes" in capsys.readouterr().err
