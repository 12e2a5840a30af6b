"""Strikes of many kinds at given and at drawn places, over all-reduce, local updates, clients, gossip and servers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import SCRIPTS, Command
from tests.distributed.test_elastic import of

pytestmark = [pytest.mark.ray, pytest.mark.slow]
DEMO = SCRIPTS.parents[2] / "paceline" / "demo_script.py"

OF_ONE_HOST = {"makes an update", "has made one", "waits for others"}
"""Where workers come to that update the parameters themselves, as under servers of their host without copies."""
OF_GOSSIP = {"sends its model", "waits for models"}
OF_JOINS = {"gives its state", "takes a state"}
"""Where nobody comes to when the run has ended before one that was asked for is there."""
OF_ROUNDS = {"has its change", "has what servers have"}
"""Where workers come to whose steps are local."""


def strike(who: str, place: str, number: int, kind: str) -> dict[str, Any]:
    return {"who": who, "place": place, "number": number, "kind": kind}


def scheduled(directory: Path, *runs: tuple[list[dict[str, Any]], int]) -> Path:
    """A schedule of these runs: strikes, and how many new workers start in dead ones' places."""
    path = directory / "given.json"
    path.write_text(json.dumps({"runs": [{"strikes": some, "replacements": more} for some, more in runs]}))
    return path


def places_left_out(directory: Path, *, of: str = "") -> set[str]:
    """Where nobody of a command's runs has come to. Whoever is to be struck there is not, and no verdict says so."""
    counts = Counter[str]()
    for path in directory.glob(f"out/*/calls/{of}*"):
        counts[path.name.partition(" ")[2]] += path.stat().st_size
    assert counts
    return {place for place, count in counts.items() if count == 0}


@pytest.mark.timeout(900)
def test_one_run_outlives_deaths_of_many_kinds(start: Callable[..., Command], tmp_path: Path) -> None:
    """Memory that runs out, a joiner that dies, a worker that stops; connections that are cut, and one more worker."""
    strikes = [
        strike("worker-0", "gives its part", 6, "cut"),
        strike("worker-1", "gives its part", 9, "memory"),
        strike("worker-3", "takes a state", 1, "segfault"),
        strike("worker-2", "has the result", 60, "stop"),
        strike("worker-0", "has the result", 70, "cut"),
        strike("worker-0", "is between steps", 20, "grow"),
    ]
    given = ["--workers", 3, "--max-steps", 100, "--schedule", scheduled(tmp_path, (strikes, 1))]
    command = start("chaos", DEMO, *given, "--out", tmp_path / "out")
    output = command.wait()
    assert command.status == 0, output
    assert ", 0 wrong; again: --schedule" in output
    assert all(f"{kind} worker-" in output for kind in ("cut", "memory", "stop", "grow")), output
    starting = {event["who"] for event in of(tmp_path / "out" / "run-1" / "out", "starting")}
    assert {"worker-3", "worker-4"} <= starting, "in a dead one's place, and as the run was asked to grow"
    lost = {event["who"]: event["details"]["why"] for event in of(tmp_path / "out" / "run-1" / "out", "lost")}
    assert lost["worker-1"] == "it has run out of memory (MemoryError)"
    command.assert_nothing_left()
    assert places_left_out(tmp_path) <= OF_JOINS | OF_GOSSIP | {"waits for changes"}


@pytest.mark.timeout(900)
def test_nothing_is_lost_in_rounds_whoever_dies(start_on_cluster: Callable[..., Command], tmp_path: Path) -> None:
    settings = ["--strategy", "diloco", "--option", "every=4", "--kills", 1, "--seed", 2]
    command = start_on_cluster("chaos", DEMO, *settings, "--out", tmp_path / "out", "--", "--epochs", 3)
    output = command.wait()
    assert command.status == 0, output
    assert ", 0 wrong; again: --schedule" in output
    assert places_left_out(tmp_path) <= OF_JOINS | OF_GOSSIP | {"has gradients"}


@pytest.mark.timeout(900)
def test_each_round_of_clients_is_the_undisturbed_one(start_on_cluster: Callable[..., Command], tmp_path: Path) -> None:
    """One dies with what its first client of a round has contributed, and another with a round's result, when a third
    has come. Clients' controls are compared, too."""
    strikes = [
        strike("worker-1", "contributes", 5, "kill"),
        strike("worker-2", "has the result", 6, "segfault"),
        strike("worker-0", "says what clients keep", 4, "pause"),
    ]
    given = ["--strategy", "scaffold", "--option", "clients=9", "--option", "fraction=0.67", "--workers", 3]
    settings = [*given, "--max-steps", 8, "--schedule", scheduled(tmp_path, (strikes, 1))]
    command = start_on_cluster("chaos", DEMO, *settings, "--out", tmp_path / "out", "--", "--epochs", 200)
    output = command.wait()
    assert command.status == 0, output
    assert "2 deaths in 1 run, 0 wrong" in output
    assert "pause worker-0" in output
    assert re.search(r"model (\d\.\de-(0[5-9]|1\d)|0\.0e\+00) apart \(of 0\.001 at most\)", output), output
    assert places_left_out(tmp_path) <= OF_JOINS


@pytest.mark.timeout(900)
def test_nothing_is_lost_between_neighbours_whoever_dies(
    start_on_cluster: Callable[..., Command], tmp_path: Path
) -> None:
    """Connections that are cut; one dies before it sends its model, another when it has received those of others."""
    strikes = [
        strike("worker-1", "sends its model", 7, "cut"),
        strike("worker-2", "sends its model", 12, "kill"),
        strike("worker-0", "has the result", 20, "segfault"),
    ]
    settings = ["--strategy", "gossip", "--workers", 4, "--schedule", scheduled(tmp_path, (strikes, 1))]
    command = start_on_cluster("chaos", DEMO, *settings, "--out", tmp_path / "out", "--", "--epochs", 2)
    output = command.wait()
    assert command.status == 0, output
    assert "2 deaths in 1 run, 0 wrong" in output
    assert places_left_out(tmp_path) <= OF_JOINS | {"has gradients", "gives its part", "waits for changes"}


@pytest.mark.timeout(900)
def test_servers_die_and_a_launcher_whose_disk_was_full(
    start_on_cluster: Callable[..., Command], tmp_path: Path
) -> None:
    """The launcher dies before it has written another checkpoint than the one that did not fit on the disk."""
    given = ["--strategy", "ps-bsp", "--option", "servers=2", "--option", "replicas=1", "--workers", 2]
    servers = [strike("server-1", "is asked", 18, "cut"), strike("server-0", "is asked", 30, "kill")]
    launchers = [strike("launcher", "writes a checkpoint", number, kind) for number, kind in ((4, "full"), (5, "kill"))]
    path = scheduled(tmp_path, (servers, 0), (launchers, 0))
    command = start_on_cluster("chaos", DEMO, *given, "--max-steps", 30, "--schedule", path, "--out", tmp_path / "out")
    output = command.wait()
    assert command.status == 0, output
    assert "2 deaths in 2 runs, 0 wrong" in output
    assert output.count("model 0.0e+00 apart") == 2
    assert "cut server-1, is asked (18); kill server-0, is asked (30)" in output
    assert "full launcher, writes a checkpoint (4); kill launcher, writes a checkpoint (5)" in output
    assert json.loads((tmp_path / "out" / "schedule.json").read_text()) == json.loads(path.read_text())


@pytest.mark.timeout(900)
def test_each_gradient_counts_once_without_lock_step(start_on_cluster: Callable[..., Command], tmp_path: Path) -> None:
    """As the servers' own counts say, and the model, to which each gradient adds its own, to the last digits."""
    given = ["--strategy", "ps-asp", "--option", "servers=2", "--option", "replicas=1", "--workers", 2]
    command = start_on_cluster(
        "chaos", SCRIPTS / "sums.py", *given, "--kills", 1, "--seed", 2, "--out", tmp_path / "out"
    )
    output = command.wait()
    assert command.status == 0, output
    assert re.search(r"kill|segfault", output)
    assert re.search(r"model \d\.\de-1[5-9] apart", output), output


@pytest.mark.timeout(900)
def test_workers_and_servers_of_one_run_die(start: Callable[..., Command], tmp_path: Path) -> None:
    """A server while others let a worker go, and another one that is stopped; then both kinds while they train. Others
    wait for whoever dies, so that each sample counts once, as servers' counts and workers' own words tell. Steps are
    slow until another worker is there, so that one comes before the end."""
    given = ["--strategy", "ps-bsp", "--option", "servers=3", "--option", "replicas=2", "--elastic", "--workers", 3]
    strikes = [
        strike("worker-1", "pushes", 8, "kill"),
        strike("server-0", "lets a worker go", 1, "kill"),
        strike("server-2", "is asked", 30, "stop"),
    ]
    others = [strike("worker-0", "waits for servers", 12, "segfault"), strike("server-1", "is asked", 20, "kill")]
    settings = [*given, "--schedule", scheduled(tmp_path, (strikes, 1), (others, 1)), "--out", tmp_path / "out"]
    command = start("chaos", SCRIPTS / "sums.py", *settings, "--", "--epochs", 4, "--until-workers", 3)
    output = command.wait()
    assert command.status == 0, output
    assert "5 deaths in 2 runs, 0 wrong" in output
    assert not any(of(tmp_path / "out" / f"run-{number}" / "out", "left_over") for number in (1, 2))
    why = {event["who"]: event["details"]["why"] for event in of(tmp_path / "out" / "run-1" / "out", "server_lost")}
    assert why["server-0"] == "its process ended"
    assert re.match(r"it was silent for \d+\.\d s and was ended", why["server-2"])
    command.assert_nothing_left()
    assert places_left_out(tmp_path) <= OF_ROUNDS | OF_ONE_HOST


@pytest.mark.timeout(900)
def test_servers_join_and_die_while_copies_and_key_ranges_move(start: Callable[..., Command], tmp_path: Path) -> None:
    """One is asked for and dies as it is given its first copy, a second one comes in its place, and one that hands a
    key range over to it dies: what each copy is made of is known from who gave it. Steps are slow until then."""
    given = ["--strategy", "ps-asp", "--option", "servers=2", "--option", "replicas=1", "--option", "ranges=4"]
    strikes = [
        strike("server-1", "is asked", 40, "more-servers"),
        strike("server-2", "is given a copy", 2, "kill"),
        strike("server-3", "hears of another chain", 2, "pause"),
        strike("server-0", "has handed over", 1, "kill"),
    ]
    path = scheduled(tmp_path, (strikes, 1))
    settings = [*given, "--elastic", "--workers", 2, "--schedule", path, "--out", tmp_path / "out"]
    given = ["--epochs", 8, "--step-s", 0.05, "--until-lost", tmp_path / "out" / "run-1" / "out", "server-0"]
    command = start("chaos", SCRIPTS / "sums.py", *settings, "--", *given)
    output = command.wait()
    assert command.status == 0, output
    assert "2 deaths in 1 run, 0 wrong" in output
    assert re.search(r"model \d\.\de-1[4-9] apart", output), output
    assert {event["who"] for event in of(tmp_path / "out" / "run-1" / "out", "copied")} >= {"server-3"}
    command.assert_nothing_left()


@pytest.mark.timeout(900)
def test_each_step_counts_once_without_steps_in_common(start: Callable[..., Command], tmp_path: Path) -> None:
    """One dies with a model that it has not answered yet, for whom another one comes, and one with a gradient."""
    strikes = [
        strike("worker-1", "takes a model", 9, "kill"),
        strike("worker-2", "has its gradient", 14, "segfault"),
        strike("worker-0", "waits for an answer", 20, "cut"),
    ]
    given = ["--strategy", "ad-psgd", "--option", "topology=chain", "--workers", 4]
    path = scheduled(tmp_path, (strikes, 1))
    command = start("chaos", DEMO, *given, "--schedule", path, "--out", tmp_path / "out", "--", "--epochs", 2)
    output = command.wait()
    assert command.status == 0, output
    assert "2 deaths in 1 run, 0 wrong" in output
    assert " apart (the strategy sets no bound)" in output
    command.assert_nothing_left()
    assert places_left_out(tmp_path) <= OF_JOINS


@pytest.mark.timeout(900)
def test_whole_batches_under_servers_are_the_undisturbed_runs(start: Callable[..., Command], tmp_path: Path) -> None:
    """A worker with a part of an update, and a server with the sum of its rounds so far."""
    given = ["--strategy", "ps-bsp", "--option", "servers=2", "--option", "replicas=1", "--workers", 3]
    strikes = [strike("worker-1", "waits for servers", 8, "kill"), strike("server-0", "is asked", 40, "kill")]
    path = scheduled(tmp_path, (strikes, 1))
    more = ["--elastic", "--global-batch", "keep", "--max-steps", 20]
    command = start("chaos", DEMO, *given, *more, "--schedule", path, "--out", tmp_path / "out")
    output = command.wait()
    assert command.status == 0, output
    assert "2 deaths in 1 run, 0 wrong" in output
    assert re.search(r"model \d\.\de-(0[5-9]|1\d) apart|model 0\.0e\+00 apart", output), output


@pytest.mark.timeout(900)
def test_a_worker_dies_that_updates_the_parameters(start_on_cluster: Callable[..., Command], tmp_path: Path) -> None:
    """And one that waits for it is stopped for a moment."""
    strikes = [strike("worker-1", "makes an update", 2, "kill"), strike("worker-0", "waits for others", 9, "pause")]
    given = ["--strategy", "ps-bsp", "--workers", 3, "--elastic", "--schedule", scheduled(tmp_path, (strikes, 1))]
    command = start_on_cluster("chaos", SCRIPTS / "sums.py", *given, "--out", tmp_path / "out", "--", "--epochs", 3)
    output = command.wait()
    assert command.status == 0, output
    assert "1 death in 1 run, 0 wrong" in output
    assert places_left_out(tmp_path, of="worker") <= OF_JOINS | OF_ROUNDS


@pytest.mark.timeout(900)
def test_a_worker_dies_with_its_change(start_on_cluster: Callable[..., Command], tmp_path: Path) -> None:
    strikes = [strike("worker-1", "has its change", 3, "kill"), strike("worker-0", "has what servers have", 4, "pause")]
    given = ["--strategy", "async-diloco", "--option", "every=4", "--workers", 3, "--elastic"]
    path = scheduled(tmp_path, (strikes, 1))
    command = start_on_cluster(
        "chaos", DEMO, *given, "--schedule", path, "--out", tmp_path / "out", "--", "--epochs", 4
    )
    output = command.wait()
    assert command.status == 0, output
    assert "1 death in 1 run, 0 wrong" in output
    left_out = places_left_out(tmp_path, of="worker")
    assert left_out <= OF_JOINS | OF_ONE_HOST | {"has its gradients", "has the parameters"}
