"""What `paceline serve` refuses before anything starts."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import filelock
import pytest

from paceline.comm.tickets import split_address
from paceline.errors import UsageError
from paceline.running import serving


@pytest.mark.parametrize(
    ("strategy", "settings", "reason"),
    [
        ("all-reduce", {}, "has no clients to serve"),
        ("fed-avg:secure=masks", {}, "secure=masks needs stages"),
        ("fed-avg:clients=1", {}, "are never there"),
        ("dp-fed-avg", {"over": 1.5}, "more clients than epsilon is told for"),
    ],
)
def test_what_cannot_be_served_is_refused(strategy: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    rounds = serving.Rounds(**settings)
    with pytest.raises(UsageError, match=reason):
        serving.serve("none.py", strategy=strategy, tickets=tmp_path / "it", listen="127.0.0.1:1", rounds=rounds)
    assert not (tmp_path / "it").exists()


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "port-taken"])
def test_a_second_server_changes_nothing_of_the_first_ones_directory(
    is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_LOCK_S", 0.0)
    script, run = tmp_path / "train.py", tmp_path / "it" / "run"
    script.write_text("")
    run.mkdir(parents=True)
    with ExitStack() as stack:
        taken = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        if is_held:
            stack.enter_context(filelock.FileLock(run / "serving.lock"))
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="another process is serving" if is_held else "cannot listen"):
            serving.serve(script, strategy="fed-avg:clients=2", tickets=tmp_path / "it", listen=listen, say=print)
    assert is_held == (not (run / "manifest.json").exists())
    if not is_held:  # a run without a round yet keeps its seed
        seed = serving._seed_in(run, None)
        assert seed == serving._seed_in(run, None) != serving._seed_in(tmp_path, None)
    with filelock.FileLock(run / "serving.lock", timeout=0):
        pass  # nothing is held any more


@pytest.mark.parametrize("settings", [{"min_clients": 0}, {"deadline_s": 0.0}, {"outweigh": 0.5}, {"over": 0.9}])
def test_rounds_of_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be"):
        serving.Rounds(**settings)


@pytest.mark.parametrize(
    ("text", "found"),
    [("here", ("here", 9610)), ("here:1", ("here", 1)), ("[::1]", ("[::1]", 9610)), ("[::1]:5", ("[::1]", 5))],
)
def test_an_address_may_leave_the_port_out(text: str, found: tuple[str, int]) -> None:
    assert split_address(text) == found


@pytest.mark.parametrize("text", ["", ":5", "::1", "fe80::1:5", "::1]", "here:", "here:x", "here:0", "here:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        split_address(text)
