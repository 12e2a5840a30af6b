"""Servers with copies die in elastic runs, as workers do, and with them: each sample counts once in every key range."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.namespaces import Host, Network
from paceline.engines.ray.letting_go import LettingGo
from tests.distributed.harness import is_training, pids, wait_until
from tests.distributed.own_network import own_network
from tests.distributed.test_elastic import SCRIPT, of, require_same_model, trained, undisturbed
from tests.distributed.test_elastic_hosts import (
    BETWEEN_SERVERS,
    PATIENCE_S,
    SAMPLES,
    end,
    host_of,
    pids_on,
    said,
    set_link,
    wait_for,
)
from tests.distributed.test_elastic_hosts import (
    start as begin,
)
from tests.distributed.test_elastic_servers import meanwhile, require_each_sample, told_of, updates
from tests.distributed.test_joining import held, iterations_of, joined

pytestmark = [pytest.mark.ray, pytest.mark.slow]
COPIES = {"servers": 2, "replicas": 1}


def kill(out: Path, server: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pids(out)[f"server-{server}"], how)


@contextmanager
def struck(
    out: Path,
    server: int,
    *,
    when: Callable[[], bool],
    how: signal.Signals = signal.SIGKILL,
    held_at: int | None = None,
) -> Iterator[None]:
    """The server is killed, or stopped for good, as soon as this is so.

    Args:
        held_at: the iteration after which all wait until it is, so that the run does not end before; none: they wait
            for something else that comes later.
    """
    failures = list[BaseException]()

    def strike() -> None:
        try:
            assert wait_until(lambda: out.exists() and is_training(out) and when())
            kill(out, server, how)
        except BaseException as failure:
            failures.append(failure)
        finally:
            if held_at is not None:
                (out.parent / "log" / f"go-{held_at}").touch()

    thread = threading.Thread(target=strike)
    thread.start()
    yield
    thread.join()
    assert not failures, failures


def require_taken_over(out: Path, server: int) -> None:
    assert [event["who"] for event in of(out, "server_lost")] == [f"server-{server}"]
    (taken,) = of(out, "taken_over")
    assert (taken["who"], taken["details"]["key_range"]) == (f"server-{1 - server}", server)
    assert not any(told_of(out)[name] for name in ("left_over", "refused"))


def require_counted(out: Path, *, times: int, samples: int = 96) -> None:
    """In both halves of the model, each of which is another server's key range."""
    halves = load_file(out / "model.safetensors")
    assert sorted(halves) == ["halves.0", "halves.1"]
    for half in halves.values():
        assert torch.equal(half, torch.full((samples,), float(times))), half


def require_the_others_updates(out: Path, *, server: int, gradients: int) -> None:
    """Each gradient counted once on the server that lived; of the other one's, records of the last moment may lack."""
    counted = Counter(updates(out))
    assert set(counted.values()) == {1}
    assert len([each for each in counted if each[0] != server]) == gradients


@pytest.mark.parametrize(
    ("strategy", "server", "how", "why"),
    [
        ("ps-asp", 0, signal.SIGKILL, r"its process ended"),
        ("ps-ssp", 1, signal.SIGSTOP, r"it was silent for \d+\.\d s and was ended"),
    ],
)
def test_a_server_dies(
    tmp_path: Path, ray_here: None, strategy: str, server: int, how: signal.Signals, why: str
) -> None:
    """Whether its process ends by itself or for its silence is told."""
    out = tmp_path / "out"
    given = ["--tally", "--step-s", 0.02, *held(40)]
    with struck(out, server, when=lambda: max(iterations_of(out), default=0) >= 8, how=how, held_at=40):
        trained(tmp_path, *given, strategy=strategy, options=COPIES, elastic="1:3", eval_every=24)
    require_taken_over(out, server)
    assert re.match(why, of(out, "server_lost")[0]["details"]["why"])
    assert not of(out, "lost")
    require_counted(out, times=2)
    require_each_sample(out, times=2)
    require_the_others_updates(out, server=server, gradients=48)


HOLD_AFTER_A_DEATH = {"ps-asp": 40, "ps-bsp": 12}
"""To which nobody comes before worker 1 is at its fifth step: two others make 32 steps of their own, and under ps-bsp
all are at the same."""


@pytest.mark.parametrize("strategy", ["ps-asp", "ps-bsp"])
def test_a_worker_and_a_server_die_at_once(tmp_path: Path, ray_here: None, strategy: str) -> None:
    out, held_at = tmp_path / "out", HOLD_AFTER_A_DEATH[strategy]
    with struck(out, 0, when=(tmp_path / "log" / "struck-1").exists, held_at=held_at):
        trained(
            tmp_path, "--tally", "--fail", "1:5:kill", "--step-s", 0.02, *held(held_at), strategy=strategy,
            options=COPIES, elastic="1:3", eval_every=16,
        )  # fmt: skip
    require_taken_over(out, 0)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    require_each_sample(out, times=2)
    require_the_others_updates(out, server=0, gradients=48)
    if strategy == "ps-asp":  # there each gradient is an update, so that the model tells
        require_counted(out, times=2)


def test_updates_are_of_whole_batches_when_a_worker_and_a_server_die_at_once(tmp_path: Path, ray_here: None) -> None:
    """Whoever takes over has what earlier rounds of the update have brought."""
    out = tmp_path / "out"
    with struck(out, 0, when=(tmp_path / "log" / "struck-1").exists, held_at=12):
        trained(
            tmp_path, "--fail", "1:5:kill", "--step-s", 0.02, *held(12), strategy="ps-bsp", options=COPIES,
            elastic="1:3", global_batch="keep", eval_every=8,
        )  # fmt: skip
    require_taken_over(out, 0)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    require_same_model(out, undisturbed())


def struck_before(monkeypatch: pytest.MonkeyPatch, out: Path, server: int, number: int) -> None:
    """Kill the server before the launcher asks servers for the time of this number."""
    ask, calls = LettingGo._ask, list[int]()

    def strike(self: LettingGo, *given: Any) -> list[Any]:
        calls.append(1)
        if len(calls) == number:
            kill(out, server)
        return ask(self, *given)

    monkeypatch.setattr(LettingGo, "_ask", strike)


@pytest.mark.parametrize(("number", "server"), [(1, 1), (2, 0)], ids=["asked first", "told what counts"])
def test_a_server_dies_while_all_let_a_worker_go(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch, number: int, server: int
) -> None:
    out = tmp_path / "out"
    struck_before(monkeypatch, out, server, number)
    trained(
        tmp_path, "--tally", "--fail", "1:5:kill", "--step-s", 0.02, strategy="ps-asp", options=COPIES, elastic="1:3",
        eval_every=16,
    )  # fmt: skip
    require_taken_over(out, server)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    require_counted(out, times=2)
    require_each_sample(out, times=2)


@pytest.mark.parametrize(("strategy", "number"), [("ps-asp", 1), ("ps-bsp", 2)], ids=["expected", "let in"])
def test_a_server_dies_while_all_let_a_worker_in(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch, strategy: str, number: int
) -> None:
    out = tmp_path / "out"
    struck_before(monkeypatch, out, 0, number)
    with meanwhile(tmp_path, (5, 3, {"ready": 1}), (12, None, {"let_in": 1})):
        trained(
            tmp_path, "--tally", "--epochs", 3, *held(5, 12), workers=2, strategy=strategy, options=COPIES,
            elastic="1:3", eval_every=16,
        )  # fmt: skip
    require_taken_over(out, 0)
    assert joined(out) == [2]
    require_each_sample(out, times=3)
    require_the_others_updates(out, server=0, gradients=72)
    if strategy == "ps-asp":
        require_counted(out, times=3)


def test_one_joins_when_a_server_has_died_and_another_dies(tmp_path: Path, ray_here: None) -> None:
    """It comes to who serves now. Then that one dies, and it follows with the others."""
    out = tmp_path / "out"

    def first_has_died() -> bool:
        return bool(of(out, "let_in"))

    with (
        struck(out, 0, when=lambda: max(iterations_of(out), default=0) >= 3),
        struck(out, 1, when=first_has_died),
        meanwhile(tmp_path, (5, None, {"taken_over": 1}), (6, 3, {"ready": 1}), (20, None, {"server_lost": 2})),
    ):
        trained(
            tmp_path, "--tally", "--epochs", 3, *held(5, 6, 20), workers=2, strategy="ps-asp",
            options={"servers": 3, "replicas": 2}, elastic="1:3", eval_every=24,
        )  # fmt: skip
    assert [event["who"] for event in of(out, "server_lost")] == ["server-0", "server-1"]
    assert joined(out) == [2]
    require_counted(out, times=3)
    require_each_sample(out, times=3)


def test_the_command_outlives_servers_and_workers(start, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    log.mkdir()
    command = start(
        "run", SCRIPT, "--strategy", "ps-asp", "--workers", 3, "--elastic", "1:4", "--option", "servers=2",
        "--option", "replicas=1", "--out", out, "--", "--tally", "--log", log, "--step-s", 0.03, "--fail", "2:6:kill",
        "--fail", "0:9:stop",
    )  # fmt: skip
    assert wait_until(lambda: (log / "struck-2").exists())
    kill(out, 1)
    output = command.wait()
    assert command.status == 0, output
    assert "server 0 has key range 1 now" in output
    assert sorted(event["who"] for event in of(out, "lost")) == ["worker-0", "worker-2"]
    require_counted(out, times=2)
    require_each_sample(out, times=2)
    command.assert_nothing_left()


@pytest.fixture
def three_hosts(program_forks: str) -> Iterator[Network]:
    with own_network(3, program_forks) as network:
        yield network


def kill_host(network: Network, host: Host) -> None:
    for pid in pids_on(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


HELD_AT = 92
"""Of 100 gradients. All wait there until who is to be struck has been."""


def finish_counted(process: subprocess.Popen[str], out: Path) -> None:
    """What a worker that is struck from outside has computed last may be dropped, and is computed again."""
    (out.parent / "log" / f"go-{HELD_AT}").touch()
    end(process)
    assert not of(out, "left_over")
    require_counted(out, times=2, samples=SAMPLES)


def copies_outlive_a_worker_in_its_push(network: Network, address: str, directory: Path) -> None:
    """It dies when it has told one server of three that its push counts; a server dies with it, on its host."""
    given = ["--tally", "--fail-at", f"2:50:{BETWEEN_SERVERS}", *held(HELD_AT)]
    options = ["--strategy", "ps-asp", "--option", "servers=3", "--option", "replicas=1"]
    process, out = begin(network, address, directory, *given, workers=3, step_s=0.05, options=options)
    wait_for(process, out, num_steps=6)
    assert wait_until(lambda: of(out, "lost"), within_s=PATIENCE_S), said(process)
    there = host_of(network, pids(out)["worker-1"])
    (server,) = [each for each in range(3) if pids(out)[f"server-{each}"] in pids_on(there)]
    kill(out, server)
    finish_counted(process, out)
    assert [event["who"] for event in of(out, "lost")] == ["worker-2"]
    assert [event["who"] for event in of(out, "server_lost")] == [f"server-{server}"]


def copies_outlive_a_host(network: Network, address: str, directory: Path) -> None:
    """With a worker and a server on it, while a worker on another one is told that its push counts."""
    options = ["--strategy", "ps-asp", "--option", "servers=3", "--option", "replicas=1"]
    given = ["--tally", *held(HELD_AT)]
    process, out = begin(network, address, directory, *given, workers=3, step_s=0.05, options=options)
    wait_for(process, out, num_steps=8)
    host = host_of(network, pids(out)["worker-2"])
    server = [each for each in range(3) if pids(out)[f"server-{each}"] in pids_on(host)]
    assert len(server) == 1
    kill_host(network, host)
    finish_counted(process, out)
    assert [event["who"] for event in of(out, "lost")] == ["worker-2"]
    assert [event["who"] for event in of(out, "server_lost")] == [f"server-{server[0]}"]
    print("taken over after", [event["details"]["took_s"] for event in of(out, "taken_over")])


def copies_outlive_a_host_that_is_cut_off(network: Network, address: str, directory: Path) -> None:
    """With the second server of two and a worker, which are silent."""
    options = ["--strategy", "ps-asp", "--option", "servers=2", "--option", "replicas=1"]
    given = ["--tally", *held(HELD_AT)]
    process, out = begin(network, address, directory, *given, workers=2, step_s=0.05, options=options)
    wait_for(process, out, num_steps=8)
    host = host_of(network, pids(out)["worker-1"])
    (server,) = [each for each in range(2) if pids(out)[f"server-{each}"] in pids_on(host)]
    set_link(network, host, "down")
    finish_counted(process, out)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert [event["who"] for event in of(out, "server_lost")] == [f"server-{server}"]


@pytest.mark.timeout(1800)
def test_copies_outlive_workers_and_hosts(three_hosts: Network, tmp_path: Path) -> None:
    address = three_hosts.start_ray()
    copies_outlive_a_worker_in_its_push(three_hosts, address, tmp_path / "push")
    copies_outlive_a_host(three_hosts, address, tmp_path / "host")
    copies_outlive_a_host_that_is_cut_off(three_hosts, address, tmp_path / "cut")
