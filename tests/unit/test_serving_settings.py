"""What `paceline serve` refuses before anything starts."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import filelock
import pytest
from typer.testing import CliRunner

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.cli.app import app
from paceline.comm.tickets import Tickets, split_address
from paceline.errors import UsageError
from paceline.running import manifest, serving


@pytest.mark.parametrize(
    ("strategy", "settings", "reason"),
    [
        ("all-reduce", {}, "has no clients to serve"),
        ("fed-avg:secure=masks:codec=random-k", {}, "leave codec out"),
        ("fed-avg:secure=masks:secure.lost=0.1", {}, "leave secure.lost out"),
        ("dp-fed-avg:secure=masks", {}, "use privacy=local"),
        ("fed-avg:secure=masks:clients=100000:fraction=1", {}, "give secure.neighbours, at most 1,000"),
        ("fed-avg:clients=1", {}, "are never there"),
        ("dp-fed-avg", {"over": 1.5}, "more clients than epsilon is told for"),
    ],
)
def test_what_cannot_be_served_is_refused(strategy: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    rounds = serving.Rounds(**settings)
    with pytest.raises(UsageError, match=reason):
        serving.serve("none.py", strategy=strategy, tickets=tmp_path / "it", listen="127.0.0.1:1", rounds=rounds)
    assert not (tmp_path / "it").exists()


def test_who_asks_for_masks_joins_no_server_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = Tickets.made(tmp_path / "it", num_clients=1, address="127.0.0.1:1")
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(serving.JoinedRun, "welcome", lambda run: ("fed-avg", {}))
    with pytest.raises(UsageError, match="sent each client's update as it is"):
        serving.join(script, ticket=tickets.path_of(0), secure=True, out=tmp_path / "out", say=lambda line: None)
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("others", [{"engine": "virtual"}, {"engine": "served", "of": "0123456789abcdef"}], ids=str)
def test_a_server_does_not_go_on_with_another_run(others: dict[str, str], tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("")
    manifest.write(tmp_path, others)
    (tmp_path / FILE_NAME).write_bytes(before := Checkpoint(3, 1.0, {}, {}, [], [], 0).encode())
    with pytest.raises(UsageError, match="is another run's, or another client's; give another --out"):
        serving.serve(script, strategy="fed-avg:clients=2", tickets=tmp_path / "it", out=tmp_path, say=print)
    assert manifest.read(tmp_path) == others
    assert (tmp_path / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("has_round", [False, True])
def test_a_server_does_not_go_on_with_another_seed(has_round: bool, tmp_path: Path) -> None:
    """Before the first round, too: clients who have joined know the server by it."""
    (script := tmp_path / "train.py").write_text("")
    tickets = Tickets.made(tmp_path / "it", num_clients=2, address=None)
    described = {"engine": "served", "of": tickets.run, "config": {"seed": 5}}
    manifest.write(tmp_path, described)
    if has_round:
        (tmp_path / FILE_NAME).write_bytes(Checkpoint(3, 1.0, {}, {}, [], [], 5).encode())
    with pytest.raises(UsageError, match="has another seed; leave --seed out"):
        serving.serve(script, strategy="fed-avg:clients=2", tickets=tmp_path / "it", out=tmp_path, seed=6, say=print)
    assert manifest.read(tmp_path) == described


def test_a_client_does_not_go_on_with_what_another_one_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with what it kept in another run of this server's."""
    tickets = Tickets.made(tmp_path / "it", num_clients=2, address="127.0.0.1:1")
    (script := tmp_path / "train.py").write_text("")
    monkeypatch.setattr(serving.JoinedRun, "welcome", lambda run: ("fed-avg", {}))
    monkeypatch.setattr(serving.JoinedRun, "run", lambda *_: None)

    def join(client: int, tag: str) -> None:
        monkeypatch.setattr(serving.JoinedRun, "tag", tag)
        serving.join(script, ticket=tickets.path_of(client), out=tmp_path / "out", say=lambda line: None)

    join(0, "first")
    join(0, "first")
    for client, tag in ((1, "first"), (0, "second")):
        with pytest.raises(UsageError, match="another client's; give another --out"):
            join(client, tag)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("serve {script} --clients 5 --option clients=3", "--clients 5 and --option clients=3 differ"),
        ("ticket {it} --revoke 1 --clients 5", "--revoke makes no tickets; leave --clients"),
        ("ticket {it} --revoke 1 --address here", "--revoke makes no tickets; leave --clients"),
    ],
)
def test_what_says_two_things_at_once_is_refused(command: str, reason: str, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("")
    Tickets.made(it := tmp_path / "it", num_clients=2, address="here")
    result = CliRunner().invoke(app, command.format(script=script, it=it).split())
    assert result.exit_code != 0
    assert reason in f"{result.output}{result.exception}"
    assert Tickets(it).listed()["1"] is not None


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
