"""What is asked of a run from another terminal, and what `paceline runs` says of each."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.cli.runs import state_of
from paceline.cli.scale import directory_of
from paceline.engines import requests
from paceline.engines.requests import Desk, ask, is_under_way
from paceline.errors import UsageError
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


@pytest.mark.parametrize(
    ("names", "files", "state"),
    [
        ([], ["model.safetensors"], "ended"),
        ([], [], "cut off"),
        (["failed"], [], "failed"),
        (["interrupted"], ["model.safetensors"], "interrupted"),
    ],
)
def test_the_state_of_a_run(tmp_path: Path, names, files, state: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"strategy": {"name": "all-reduce"}}))
    events = [{"name": name, "who": "run", "iteration": 1, "time_s": 0.0, "details": {}} for name in names]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for name in files:
        (tmp_path / name).touch()
    assert state_of(Result.open(tmp_path)) == state
    with desk_in(tmp_path, answered):
        assert state_of(Result.open(tmp_path)) == "under way"


def test_runs_are_listed_and_found_by_name(tmp_path: Path, monkeypatch, capsys) -> None:
    from paceline.cli import main

    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "mine"
    directory.mkdir(parents=True)
    (tmp_path / "runs" / "other").mkdir()
    manifest = {"strategy": {"name": "ps-bsp"}, "num_workers": 3, "started": "2026-01-01T00:00:00+00:00"}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert directory_of(Path("mine")) == Path("runs/mine")
    with pytest.raises(UsageError, match="none is no directory of a run"):
        directory_of(Path("none"))
    monkeypatch.setattr(sys, "argv", ["paceline", "runs"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "cut off" in shown
    assert "ps-bsp" in shown
    assert "other" not in shown
