"""Workers on other hosts die, whole hosts die, and the network parts: the launcher's side goes on, with the undisturbed
run's model.

TensorFlow tests a preempted host as a worker that is killed, and torchft a replica group that is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from benchmarks.namespaces import SWITCH, Host, Network
from paceline.topology import Ring
from tests.distributed.harness import SCRIPTS, pids, wait_until
from tests.distributed.own_network import own_network
from tests.distributed.test_elastic import of, require_each_sample_once, require_same_model, undisturbed
from tests.distributed.test_elastic_ad_psgd import require_counted
from tests.distributed.test_elastic_gossip import make
from tests.distributed.test_elastic_gossip import require_replayed as require_mixed
from tests.distributed.test_elastic_robust import HostileMixes, Joining, require_joined, require_rounds
from tests.distributed.test_elastic_rounds import require_replayed_exchanges
from tests.distributed.test_elastic_servers import require_whole, updates
from tests.distributed.test_joining import held, iterations_of, joined
from tests.gossip_replay import Replay

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


SCRIPT = str(SCRIPTS / "survivors.py")
DEMO = SCRIPTS.parents[2] / "paceline" / "demo_script.py"
SAMPLES = 200
DEADLINE_S = 3.0
PATIENCE_S = 500.0  # processes start in seconds, but where other programs have the cores


# Before a worker sends a server a message: of four a step to two servers elsewhere the second in which it says that its
# push counts.
BETWEEN_SERVERS = "paceline.server.client_core:ClientCore._sent"


@pytest.fixture
def four_hosts(program_forks: str) -> Iterator[Network]:
    with own_network(4, program_forks) as network:
        yield network


@pytest.fixture
def three_hosts(program_forks: str) -> Iterator[Network]:
    with own_network(3, program_forks) as network:
        yield network


def paceline(network: Network) -> str:
    return str(network.programs / "paceline")


def start(
    network: Network,
    address: str,
    directory: Path,
    *arguments: object,
    workers: int,
    samples: int = SAMPLES,
    step_s: float = 0.1,
    elastic: str = "1:6",
    options: Sequence[str] = (),
) -> tuple[subprocess.Popen[str], Path]:
    log, out = directory / "log", directory / "out"
    log.mkdir(parents=True)
    settings = ["--workers", str(workers), "--address", address, "--elastic", elastic, "--out", str(out), *options]
    settings += ["--start-deadline", str(PATIENCE_S)]
    given = [*map(str, arguments), "--samples", str(samples), "--step-s", str(step_s), "--log", str(log)]
    return network.start(network.hosts[0], [paceline(network), "run", SCRIPT, *settings, "--", *given]), out


def said(process: subprocess.Popen[str]) -> tuple[str, str]:
    """By a run that a test has given up, which may be held for ever: it is killed."""
    process.kill()
    return process.communicate(timeout=PATIENCE_S)


def end(process: subprocess.Popen[str]) -> None:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output[-3000:] + errors[-3000:]


def finish(process: subprocess.Popen[str], out: Path, *, workers: int) -> None:
    end(process)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 2 * SAMPLES
    require_same_model(out, undisturbed(workers=workers, samples=SAMPLES))


def wait_for(process: subprocess.Popen[str], out: Path, *, num_steps: int) -> None:
    """Until the first worker has made so many."""
    log, until_s = out.parent / "log" / "rank-0", time.monotonic() + PATIENCE_S
    while not log.exists() or len(log.read_text().splitlines()) < num_steps:
        assert process.poll() is None, said(process)
        assert time.monotonic() < until_s
        time.sleep(0.05)


def pids_on(host: Host) -> set[int]:
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    return set(map(int, listed.stdout.split()))


def host_of(network: Network, pid: int) -> Host:
    return next(host for host in network.hosts if pid in pids_on(host))


def require_end(pid: int, host: Host) -> None:
    """It ends by itself when its lease does, which the launcher's last word has made three deadlines long."""
    assert pid in pids_on(host)
    began_s = time.monotonic()
    assert wait_until(lambda: pid not in pids_on(host), within_s=3 * DEADLINE_S + 60)
    took_s = time.monotonic() - began_s
    print(f"process {pid} ended {took_s:.2f} s after its host was cut off")
    assert took_s > DEADLINE_S  # the last word may have come some time before


def set_link(network: Network, host: Host, state: str) -> None:
    port = f"port{network.hosts.index(host) + 1}"
    subprocess.run(["ip", "-n", SWITCH, "link", "set", port, state], check=True)


def scale(network: Network, out: Path, workers: int) -> str:
    return network.run(
        network.hosts[0], [paceline(network), "scale", str(out), "--workers", str(workers)], timeout_s=PATIENCE_S
    )


def go_on(process: subprocess.Popen[str], out: Path, *, held_at: Sequence[int]) -> None:
    """At each of these iterations, when one more worker is there."""
    for number, iteration in enumerate(held_at, start=1):
        is_there = wait_until(lambda number=number: len(of(out, "ready")) == number, within_s=PATIENCE_S)
        assert is_there, said(process)
        (out.parent / "log" / f"go-{iteration}").touch()


def workers_join_on_a_host_that_comes(network: Network, address: str, directory: Path) -> None:
    """A Ray node that comes while the run trains has the next worker. One that dies is replaced where it was."""
    given = [*held(5, 15), "--fail", "1:9:kill"]
    process, out = start(network, address, directory, *given, workers=3, step_s=0.02, options=["--replace", "1"])
    wait_for(process, out, num_steps=5)
    network.join_ray(network.hosts[3], address)
    struck = host_of(network, pids(out)["worker-1"])
    assert "3 workers train; 1 more start" in scale(network, out, 4)
    go_on(process, out, held_at=(5, 15))
    finish(process, out, workers=3)
    require_each_sample_once(out, samples=SAMPLES)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert joined(out) == [3, 4]
    places = {event["who"]: event["details"]["address"] for event in of(out, "starting")}
    assert places == {"worker-3": network.hosts[3].address, "worker-4": struck.address}
    print("reformed after", [event["details"]["took_s"] for event in of(out, "reformed")])


def workers_join_and_die_in_rounds(
    network: Network, address: str, directory: Path, *, more: str = "", within: float = 1e-6
) -> None:
    """One process replays what the workers have written down, and comes to the same model, to which a codec leaves
    all, but for what the dead owed."""
    strategy = f"diloco:every=2{more}"
    given = ["--epochs", 3, *held(2), "--fail", "1:9:kill"]
    options = ["--strategy", strategy]
    process, out = start(network, address, directory, *given, workers=3, samples=96, step_s=0.02, options=options)
    wait_for(process, out, num_steps=4)
    assert "3 workers train; 1 more start" in scale(network, out, 4)
    go_on(process, out, held_at=(2,))
    end(process)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert joined(out) == [3]
    require_replayed_exchanges(out, strategy, workers=3, epochs=3, within=within)


def workers_join_and_die_between_neighbours(network: Network, address: str, directory: Path) -> None:
    """As in rounds, under gossip."""
    given = ["--epochs", 3, *held(4), "--fail", "1:9:kill"]
    process, out = start(
        network, address, directory, *given, workers=3, samples=96, step_s=0.02, options=["--strategy", "gossip"]
    )
    wait_for(process, out, num_steps=4)
    assert "3 workers train; 1 more start" in scale(network, out, 4)
    go_on(process, out, held_at=(4,))
    end(process)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert joined(out) == [3]
    require_mixed(out, Replay(make, Ring()), epochs=3)


def workers_join_and_die_beside_a_hostile_one(
    network: Network, address: str, directory: Path, strategy: str, *, workers: int, elastic: str, attack: str
) -> Path:
    """The last one is hostile. On two of three hosts there is more than one worker."""
    given = ["--epochs", 3, "--decay", 1.0, *held(2), "--fail", "1:9:kill"]
    options = ["--strategy", strategy, "--attack", attack, "--global-batch", "grow"]
    settings = {"workers": workers, "elastic": elastic, "samples": 96, "step_s": 0.02, "options": options}
    process, out = start(network, address, directory, *given, **settings)
    wait_for(process, out, num_steps=2)
    assert f"{workers} workers train; 1 more start" in scale(network, out, workers + 1)
    go_on(process, out, held_at=(2,))
    end(process)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1"]
    assert joined(out) == [workers]
    return out


def test_workers_join_and_die_beside_a_hostile_one(three_hosts: Network, tmp_path: Path) -> None:
    """Gradients, changes of rounds, neighbours' models and pushes: one process makes the same model of what counts."""
    network, address = three_hosts, three_hosts.start_ray()
    run = partial(workers_join_and_die_beside_a_hostile_one, network, address)
    attack, krum = "ipm:strength=4", "krum:byzantine=1"
    with_krum = ":aggregate=krum:aggregate.byzantine=1"
    out = run(tmp_path / "gradients", f"all-reduce{with_krum}", workers=5, elastic="4:6", attack=attack)
    require_joined(out, Joining(krum, attack, workers=5), epochs=3)
    strategy = f"local-sgd:every=2{with_krum}"
    out = run(tmp_path / "rounds", strategy, workers=5, elastic="4:6", attack=attack)
    require_rounds(out, strategy, Joining(krum, attack, workers=5), workers=5, epochs=3)
    out = run(tmp_path / "neighbours", "gossip", workers=4, elastic="3:5", attack="sign-flip")
    require_mixed(out, HostileMixes(Joining("mean", "sign-flip", workers=4)), epochs=3)
    out = run(tmp_path / "servers", f"ps-bsp{with_krum}", workers=5, elastic="4:6", attack=attack)
    require_joined(out, Joining(krum, attack, workers=5, knows_all=False), epochs=3)


def nobody_goes_on_alone_on_the_other_side(network: Network, address: str, directory: Path) -> None:
    """It needs nobody else for its steps, and the launcher's run is over: there are never two."""
    given = ["--fail", "0:4:kill", *held(40)]
    process, out = start(network, address, directory, *given, workers=2, step_s=0.05)
    assert wait_until(lambda: of(out, "reformed"), within_s=PATIENCE_S), said(process)
    other = pids(out)["worker-1"]
    alone = host_of(network, other)
    set_link(network, alone, "down")
    (out.parent / "log" / "go-40").touch()
    require_end(other, alone)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "0 workers are left" in output + errors


def chaos_strikes_links_and_nodes(network: Network, address: str, directory: Path) -> None:
    """Links that fail for a moment, that carry little, and that fail for longer than the deadline; connections that are
    cut; and a Ray node."""
    directory.mkdir()
    links = [strike(1, 6, "flicker"), strike(2, 12, "slow"), strike(1, 20, "cut"), strike(2, 30, "part")]
    others = [strike(2, 12, "node")], [strike(1, 12, "node")]  # the next run has the host again
    runs = [{"strikes": some, "replacements": 0} for some in (links, *others)]
    (directory / "given.json").write_text(json.dumps({"runs": runs}))
    settings = ["--workers", "3", "--max-steps", "60", "--address", address]
    files = ["--schedule", str(directory / "given.json"), "--out", str(directory / "out")]
    process = network.start(network.hosts[0], [paceline(network), "chaos", str(DEMO), *settings, *files])
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output + errors
    assert "3 deaths in 3 runs, 0 wrong" in output
    for kind in ("flicker", "slow", "cut", "part", "node"):
        assert f"{kind} worker-" in output
    for number in range(1, 1 + len(runs)):  # from the first word of a change on, which comes after the silence
        reformed = of(directory / "out" / f"run-{number}" / "out", "reformed")
        assert max(event["details"]["took_s"] for event in reformed) < 3 * DEADLINE_S


def strike(rank: int, number: int, kind: str) -> dict[str, object]:
    return {"who": f"worker-{rank}", "place": "gives its part", "number": number, "kind": kind}


def workers_and_hosts_die_and_are_cut_off(network: Network, address: str, directory: Path) -> None:
    """A worker in mid-step, beside others on its host; a host with all that runs there; and a host that is cut off. Of
    18 steps nobody makes the tenth, or the fifteenth, before."""
    process, out = start(network, address, directory, "--fail", "3:4:kill", *held(9, 14), workers=6, step_s=0.05)
    wait_for(process, out, num_steps=7)
    ended = host_of(network, pids(out)["worker-5"])
    for pid in pids_on(ended):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (out.parent / "log" / "go-9").touch()
    assert wait_until(lambda: len(of(out, "reformed")) == 2, within_s=PATIENCE_S), said(process)
    assert wait_until(lambda: max(iterations_of(out), default=0) >= 11, within_s=PATIENCE_S), said(process)  # they met
    cut_off = host_of(network, pids(out)["worker-4"])
    set_link(network, cut_off, "down")
    (out.parent / "log" / "go-14").touch()
    require_end(pids(out)["worker-4"], cut_off)  # the others go on meanwhile
    finish(process, out, workers=6)
    lost = {event["who"]: event["details"]["why"] for event in of(out, "lost")}
    assert list(lost) == ["worker-3", "worker-5", "worker-4"]
    assert "it was silent for" in lost["worker-4"]
    reformed = [event["details"] for event in of(out, "reformed")]
    assert [each["ranks"] for each in reformed] == [[0, 1, 2, 4, 5], [0, 1, 2, 4], [0, 1, 2]]
    assert reformed[-1]["took_s"] < 10 * DEADLINE_S


def test_workers_and_hosts_die_and_are_cut_off(four_hosts: Network, tmp_path: Path) -> None:
    workers_and_hosts_die_and_are_cut_off(four_hosts, four_hosts.start_ray(), tmp_path / "deaths")


def test_workers_join_and_hosts_are_struck(four_hosts: Network, tmp_path: Path) -> None:
    """A run after the other on one cluster, which takes long to start."""
    network, address = four_hosts, four_hosts.start_ray(3)
    workers_join_on_a_host_that_comes(network, address, tmp_path / "joins")
    workers_join_and_die_in_rounds(network, address, tmp_path / "rounds")
    low_rank = ":codec=powersgd:codec.rank=64:codec.least=0:codec.start=0"
    workers_join_and_die_in_rounds(network, address, tmp_path / "coded", more=":codec=top-k:codec.ratio=1")
    workers_join_and_die_in_rounds(network, address, tmp_path / "low-rank", more=low_rank, within=0.05)
    workers_join_and_die_in_rounds(network, address, tmp_path / "delayed", more=":delay=1:alpha=0.5")
    workers_join_and_die_between_neighbours(network, address, tmp_path / "neighbours")
    chaos_strikes_links_and_nodes(network, address, tmp_path / "chaos")


def test_none_goes_on_alone(four_hosts: Network, tmp_path: Path) -> None:
    """On a cluster of which no host has been struck: one that has may be on its way back."""
    nobody_goes_on_alone_on_the_other_side(four_hosts, four_hosts.start_ray(3), tmp_path / "alone")


def finish_whole(process: subprocess.Popen[str], out: Path, *, gradients: int) -> None:
    """Each gradient counted on both servers, once, and each sample in one of them."""
    end(process)
    assert not of(out, "left_over")
    require_whole(out, servers=2, gradients=gradients)
    assert json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])["samples"] == 4 * gradients


def servers_outlive_workers(network: Network, address: str, directory: Path) -> None:
    """Of three hosts two have a server. The worker of the third dies when it has told one of them that its push counts,
    and not the other; then one beside a server stops."""
    given = ["--fail-at", f"2:38:{BETWEEN_SERVERS}", "--fail", "1:14:stop"]
    options = ["--strategy", "ps-bsp", "--option", "servers=2"]
    process, out = start(network, address, directory, *given, workers=3, samples=96, step_s=0.02, options=options)
    finish_whole(process, out, gradients=48)
    assert [event["who"] for event in of(out, "lost")] == ["worker-2", "worker-1"]
    assert of(out, "let_go")[0]["details"]["steps"] == 9, "its push counts"


def servers_outlive_a_host(network: Network, address: str, directory: Path) -> None:
    """One joins, and trains; then the host without a server dies."""
    options = ["--strategy", "ps-asp", "--option", "servers=2"]
    given = ["--epochs", 3, *held(5, 16, 40)]
    process, out = start(network, address, directory, *given, workers=3, samples=96, step_s=0.02, options=options)
    wait_for(process, out, num_steps=1)
    assert "3 workers train; 1 more start" in scale(network, out, 4)
    go_on(process, out, held_at=(5,))
    assert wait_until(lambda: of(out, "let_in"), within_s=PATIENCE_S), said(process)
    (out.parent / "log" / "go-16").touch()
    assert wait_until(lambda: max(iterations_of(out), default=0) >= 40, within_s=PATIENCE_S), said(process)
    for pid in pids_on(host_of(network, pids(out)["worker-2"])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: of(out, "let_go"), within_s=PATIENCE_S), said(process)
    (out.parent / "log" / "go-40").touch()
    finish_whole(process, out, gradients=72)
    assert "worker-2" in [event["who"] for event in of(out, "lost")]
    assert {worker for _, worker, _ in updates(out)} == {0, 1, 2, 3}


def workers_meet_anew_in_pairs(network: Network, address: str, directory: Path) -> None:
    """One joins, and one is killed; then a host is cut off, whose worker others know only some steps of."""
    options = ["--strategy", "ad-psgd", "--option", "topology=chain", "--eval-every", "16"]
    given = ["--epochs", 3, *held(8, 120), "--fail", "1:14:kill"]
    process, out = start(network, address, directory, *given, workers=3, options=options)
    wait_for(process, out, num_steps=1)
    assert "3 workers train; 1 more start" in scale(network, out, 4)
    go_on(process, out, held_at=(8,))
    assert wait_until(lambda: joined(out) and of(out, "lost"), within_s=PATIENCE_S), said(process)
    cut_off = host_of(network, pids(out)["worker-2"])
    set_link(network, cut_off, "down")
    (out.parent / "log" / "go-120").touch()
    end(process)
    set_link(network, cut_off, "up")
    assert joined(out) == [3]
    assert [event["who"] for event in of(out, "lost")] == ["worker-1", "worker-2"]
    require_counted(out, epochs=3, samples=SAMPLES)


def test_workers_without_steps_in_common_meet_anew(four_hosts: Network, tmp_path: Path) -> None:
    workers_meet_anew_in_pairs(four_hosts, four_hosts.start_ray(), tmp_path / "pairs")


def test_servers_outlive_workers_and_a_host(three_hosts: Network, tmp_path: Path) -> None:
    address = three_hosts.start_ray()
    servers_outlive_workers(three_hosts, address, tmp_path / "workers")
    servers_outlive_a_host(three_hosts, address, tmp_path / "host")
