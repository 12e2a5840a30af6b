"""Servers come to runs that train: in dead ones' places, and as many more as are asked for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import paceline
from benchmarks.namespaces import Network
from paceline.engines import requests
from paceline.errors import UsageError
from tests.distributed.harness import events, is_training, pids, wait_until
from tests.distributed.own_network import own_network
from tests.distributed.test_elastic import SCRIPT, of, require_same_model, trained, undisturbed
from tests.distributed.test_elastic_hosts import PATIENCE_S, end, host_of, start, wait_for
from tests.distributed.test_elastic_hosts import paceline as command_of
from tests.distributed.test_elastic_replicas import COPIES, require_counted
from tests.distributed.test_elastic_servers import require_each_sample
from tests.distributed.test_joining import held, iterations_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]
Turn = tuple[int, Callable[[], object], dict[str, int]]


def kill(out: Path, server: int) -> None:
    joined = {event["who"]: event["details"]["process"] for event in of(out, "server_joined")}
    os.kill((pids(out) | joined)[f"server-{server}"], signal.SIGKILL)


@contextmanager
def meanwhile(out: Path, *turns: Turn) -> Iterator[None]:
    """At each of these iterations does something. Workers, which wait two iterations later, go on when there are so
    many of each of these events."""
    failures = list[BaseException]()

    def look_after() -> None:
        try:
            assert wait_until(lambda: out.exists() and is_training(out))
            for iteration, do, wanted in turns:
                assert wait_until(lambda i=iteration: max(iterations_of(out), default=0) >= i)
                do()
                for name, count in wanted.items():
                    assert wait_until(lambda n=name, c=count: len(of(out, n)) >= c), name
                go_on(iteration)
        except BaseException as failure:
            failures.append(failure)
            for iteration, *_ in turns:
                go_on(iteration)

    def go_on(iteration: int) -> None:
        (out.parent / "log" / f"go-{iteration + 2}").touch()

    thread = threading.Thread(target=look_after)
    thread.start()
    yield
    thread.join()
    assert not failures, failures


def held_after(*iterations: int) -> list[object]:
    return held(*(iteration + 2 for iteration in iterations))


def nothing() -> None:
    return None


def test_dead_servers_are_replaced_until_none_of_the_start_is_left(tmp_path: Path, ray_here: None) -> None:
    """Copies are made, and key ranges handed over, while workers train. The model is the undisturbed run's."""
    out = tmp_path / "out"
    turns: list[Turn] = [
        (3, partial(kill, out, 0), {"server_joined": 1}),
        (24, nothing, {"copied": 2, "taken_over": 2}),
        (28, partial(kill, out, 1), {"server_joined": 2}),
        (50, nothing, {"copied": 4}),
        (54, partial(kill, out, 2), {"server_lost": 3}),
    ]
    with meanwhile(out, *turns):
        trained(
            tmp_path, "--epochs", 6, *held_after(3, 24, 28, 50, 54), workers=2, strategy="ps-bsp", options=COPIES,
            elastic="1:2", replace=2, start_deadline_s=500,
        )  # fmt: skip
    assert [event["who"] for event in of(out, "server_lost")] == ["server-0", "server-1", "server-2"]
    assert [event["who"] for event in of(out, "server_joined")] == ["server-2", "server-3"]
    assert all(event["details"]["copies"] == 2 for event in of(out, "copied"))
    assert not any(of(out, name) for name in ("not_copied", "not_handed_over", "not_joined", "lost"))
    assert of(out, "taken_over")[-1]["who"] == "server-3"
    require_same_model(out, undisturbed(workers=2, epochs=6))
    resumed = paceline.run(
        SCRIPT, workers=2, arguments=["--epochs", "7", "--log", str(tmp_path / "log")], out=tmp_path / "resumed",
        strategy="ps-bsp", options=COPIES, elastic="1:2", resume=out, start_deadline_s=500,
    )  # fmt: skip
    assert resumed.iteration == 84


def test_a_server_that_is_asked_for_takes_key_ranges(tmp_path: Path, ray_here: None) -> None:
    out = tmp_path / "out"

    def scale() -> None:
        with pytest.raises(UsageError, match="those that are there stay"):
            requests.ask(out, {"do": "scale", "servers": 1})
        assert requests.ask(out, {"do": "scale", "servers": 3}) == "the run has 2 servers; 1 more start"

    with meanwhile(out, (3, scale, {"server_joined": 1}), (20, nothing, {"released": 2, "taken_over": 1})):
        trained(
            tmp_path, "--tally", "--epochs", 4, *held_after(3, 20), workers=2, strategy="ps-asp",
            options={**COPIES, "ranges": 4}, elastic="1:3", start_deadline_s=500,
        )  # fmt: skip
    assert {event["who"] for event in of(out, "copied")} == {"server-2"}
    assert [event["who"] for event in of(out, "taken_over")] == ["server-2"]
    assert not any(of(out, name) for name in ("not_copied", "not_handed_over", "server_lost", "refused"))
    require_counted(out, times=4)
    require_each_sample(out, times=4)


def test_servers_without_replicas_cannot_be_more(tmp_path: Path, ray_here: None) -> None:
    out = tmp_path / "out"

    def scale() -> None:
        with pytest.raises(UsageError, match="since servers have no replicas"):
            requests.ask(out, {"do": "scale", "servers": 2})

    with meanwhile(out, (3, scale, {})):
        trained(tmp_path, *held_after(3), workers=1, strategy="ps-asp", elastic="1:2", start_deadline_s=500)


# --- several hosts --------------------------------------------------------------------------------------------------

NUM_RANGES = 4


@pytest.fixture
def three_hosts(program_forks: str) -> Iterator[Network]:
    with own_network(3, program_forks) as network:
        yield network


def holders(out: Path) -> list[set[str]]:
    """Servers that have a copy of each key range now, of two that had one of each at the start."""
    held = [{"server-0", "server-1"} for _ in range(NUM_RANGES)]
    for event in events(out):
        if event["name"] == "copied":
            held[event["details"]["key_range"]].add(event["who"])
        elif event["name"] == "released":
            held[event["details"]["key_range"]].discard(event["who"])
        elif event["name"] == "server_lost":
            for each in held:
                each.discard(event["who"])
    return held


def have_settled(out: Path, *joined: str) -> bool:
    """Whether each key range has two copies, and each of those that have joined has one of some."""
    held = holders(out)
    return all(len(each) == 2 for each in held) and set(joined) <= set[str]().union(*held)


@pytest.mark.timeout(1800)
def test_servers_that_join_on_other_hosts_keep_copies_on_different_ones(three_hosts: Network, tmp_path: Path) -> None:
    """Two join two: one on the host without a server, and one beside another. Then one of the start dies, and is
    replaced on its host, which has none then."""
    network, directory = three_hosts, tmp_path / "joining"
    options = ["--strategy", "ps-asp", "--option", "servers=2", "--option", "replicas=1"]
    options += ["--option", f"ranges={NUM_RANGES}", "--replace", "1"]
    given = ["--tally", "--epochs", 4, *held(5, 30, 60)]
    process, out = start(
        network, network.start_ray(), directory, *given, workers=2, samples=96, step_s=0.05, options=options
    )

    def awaited(is_so: Callable[[], bool], then: int) -> None:
        assert wait_until(is_so, within_s=PATIENCE_S), (events(out), process.poll())
        (directory / "log" / f"go-{then}").touch()

    wait_for(process, out, num_steps=1)
    asking = [command_of(network), "scale", str(out), "--servers", "4"]
    assert "2 more start" in network.run(network.hosts[0], asking, timeout_s=PATIENCE_S)
    awaited(lambda: len(of(out, "server_joined")) == 2, 5)
    awaited(lambda: have_settled(out, "server-2", "server-3") and bool(of(out, "taken_over")), 30)
    first = pids(out)
    addresses = {f"server-{each}": host_of(network, first[f"server-{each}"]).address for each in range(2)}
    addresses |= {event["who"]: event["details"]["address"] for event in of(out, "server_joined")}
    assert len({*addresses.values()}) == 3
    struck = next(each for each in addresses if each in first and addresses[each] != network.hosts[0].address)
    os.kill(first[struck], signal.SIGKILL)
    awaited(lambda: len(of(out, "server_joined")) == 3 and have_settled(out, "server-4"), 60)
    end(process)
    (replaced,) = [event for event in of(out, "server_joined") if event["who"] == "server-4"]
    assert replaced["details"]["address"] == addresses.pop(struck)
    addresses["server-4"] = replaced["details"]["address"]
    for each in holders(out):
        assert len({addresses[server] for server in each}) >= 2, (each, addresses)
    assert [event["who"] for event in of(out, "server_lost")] == [struck]
    assert not any(of(out, name) for name in ("not_copied", "not_handed_over", "not_joined", "lost", "left_over"))
    require_counted(out, times=4)
