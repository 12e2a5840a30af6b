"""What is drawn for runs that are struck, and what of it can be done here: without a run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from paceline.comm.servers.group import ServerGroup
from paceline.engines import striking
from paceline.engines.ray import nodes
from paceline.engines.requests import Desk
from paceline.engines.scripting import Script, is_lack_of_memory
from paceline.engines.striking import KINDS, SERVERS, Strike, acts, connections, hosts
from paceline.errors import RunFailed, UsageError
from paceline.running.chaos import Campaign, Schedule, drawing, launcher, runs, schedule
from paceline.running.chaos.program import AMONG_WORKERS, PLACES, UNDER_SERVERS, _write_pushes
from paceline.running.chaos.roles import Role, roles_of
from paceline.server.spec import Push
from paceline.server.whole_updates import Share
from paceline.strategies import build
from paceline.strategies.quorum import QuorumSynchronizer
from paceline.strategies.serving import ServerSynchronizer
from paceline.training.sharding.division import RankBatch
from paceline.training.sharding.orders import Orders

CALLS = {f"worker-{rank}": dict.fromkeys(AMONG_WORKERS.often, 20) for rank in range(3)}
SCRIPT = Script("train.py", "", (), "/tmp", ())
WITHOUT_LACKS = {name: replace(kind, lacks=lambda: "") for name, kind in KINDS.items()}
SERVER_CALLS = {f"server-{index}": dict.fromkeys(SERVERS.often, 20) for index in range(3)}
BOTH_CALLS = {f"worker-{rank}": dict.fromkeys(UNDER_SERVERS.often, 20) for rank in range(3)} | SERVER_CALLS
WORKER, SERVER = Role("worker", AMONG_WORKERS, 2), Role("server", SERVERS, 1, is_elastic=False)


def test_places_are_there() -> None:
    places = [*(each.all for each in PLACES.values()), SERVERS.all, launcher.PLACES]
    for owner, name in [place for each in places for place in each.values()]:
        assert callable(getattr(owner, name))


def test_what_stands_in_for_others_is_written_down_as_of_no_samples(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ServerGroup, "exchange", lambda group, push: None)
    monkeypatch.setattr(Orders, "fetched", lambda orders, batches: batches)
    for owner in (ServerSynchronizer, QuorumSynchronizer):
        monkeypatch.setattr(owner, "step", owner.step)  # to be as before when this ends
    monkeypatch.setenv(striking.VARIABLE, str(tmp_path))
    (tmp_path / "pushed").mkdir()
    _write_pushes("worker-0", [0])
    for clock, share in enumerate([None, Share(1, 0, 0, 1), Share(0, 0, 0, 2)]):
        next(Orders.fetched(None, iter([RankBatch((7,), 1.0)])))
        ServerGroup.exchange(SimpleNamespace(clock=clock), Push(pause_at=9, share=share))
    lines = (tmp_path / "pushed" / "worker-0").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [[0, [7]], [1, [7]], [2, []]]


def test_silence_tells_pauses_from_what_is_deadly() -> None:
    assert 5 * acts.PAUSED_S <= runs.SILENT_S < acts.HELD_S / 2
    assert 5 * hosts.FLICKER_S <= runs.SILENT_S <= hosts.PARTED_S / 2


def test_draws_leave_enough_alive_and_can_be_drawn_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.running.chaos.drawing.KINDS", WITHOUT_LACKS)
    drawn = [drawing.of_workers(Random(seed), CALLS, WORKER) for seed in range(100)]
    assert drawn == [drawing.of_workers(Random(seed), CALLS, WORKER) for seed in range(100)]
    for scene in drawn:
        assert 1 <= len({strike.who for strike in scene.strikes if strike.is_deadly} & CALLS.keys()) <= 2
    strikes = [strike for scene in drawn for strike in scene.strikes]
    assert {strike.place for strike in strikes} == set(AMONG_WORKERS.all)
    outlived = {"pause", "cut", "grow", "shrink"}
    assert {strike.kind for strike in strikes} == {"kill", "segfault", "stop", "hold", "memory", *outlived}
    servers = [drawing.of_servers(Random(seed), SERVER_CALLS, SERVER) for seed in range(50)]
    assert all(sum(strike.is_deadly for strike in scene.strikes) == 1 for scene in servers)
    assert {strike.kind for scene in servers for strike in scene.strikes} == {"kill", "segfault", "pause", "cut"}
    launchers = [strike for seed in range(100) for strike in drawing.of_launcher(Random(seed)).strikes]
    assert {strike.place for strike in launchers} == set(launcher.PLACES)
    assert {strike.kind for strike in launchers} == {"kill", "full"}
    others = [["worker-0", "worker-1"], ["worker-2"]]
    of_hosts = [drawing.of_host(Random(seed), CALLS, [replace(WORKER, most=1)], others, left=1) for seed in range(100)]
    on_hosts = [strike for scene in of_hosts if scene is not None for strike in scene.strikes]
    assert {strike.kind for strike in on_hosts if strike.who == "worker-2"} == {"part", "flicker", "slow", "node"}
    assert {strike.kind for strike in on_hosts if strike.who != "worker-2"} == {"flicker", "slow"}
    often = [each for each in strikes if each.place in AMONG_WORKERS.often] + [
        each for scene in servers for each in scene.strikes
    ]
    assert {each.number for each in often} == set(range(3, 17))  # of 20 calls
    path = tmp_path / "schedule.json"
    Schedule(tuple(drawn)).write(path)
    assert Schedule.read(path) == Schedule(tuple(drawn))
    path.write_text("{}")
    with pytest.raises(UsageError, match="no schedule that `paceline chaos` wrote"):
        Schedule.read(path)


def test_workers_and_servers_are_struck_in_one_run_and_apart(monkeypatch) -> None:
    """At most as many as may die in a run; servers also where they let go or in whoever dies or joins."""
    monkeypatch.setattr("paceline.running.chaos.drawing.KINDS", WITHOUT_LACKS)
    traits = build("ps-asp", {"servers": 3, "replicas": 2}).traits
    roles = roles_of(traits, is_elastic=True, workers=3, at_least=1)
    assert [(role.who, role.most, role.is_elastic) for role in roles] == [("worker", 2, True), ("server", 2, True)]
    drawn = [drawing.of_members(Random(seed), BOTH_CALLS, roles, left=3) for seed in range(400)]
    assert drawn == [drawing.of_members(Random(seed), BOTH_CALLS, roles, left=3) for seed in range(400)]
    deadly = [[each for each in scene.strikes if each.is_deadly] for scene in drawn]
    workers, servers = ([[each for each in some if each.who.startswith(who)] for some in deadly] for who in ("w", "s"))
    assert {(bool(w), bool(s)) for w, s in zip(workers, servers, strict=True)} == {
        (True, True),
        (True, False),
        (False, True),
    }
    assert max(len({each.who for each in some} & CALLS.keys()) for some in workers) == 2
    assert max(len({each.who for each in some} & SERVER_CALLS.keys()) for some in servers) == 2
    assert {each.place for some in workers for each in some} == set(UNDER_SERVERS.all)
    assert {each.place for some in servers for each in some} == set(SERVERS.all)
    assert {"stop", "hold"} <= {each.kind for some in servers for each in some}
    alone = [s for w, s in zip(workers, servers, strict=True) if not w]
    assert {each.place for some in alone for each in some} == set(SERVERS.all) - {*SERVERS.after_a_death} - {
        *SERVERS.at_a_join
    }
    one = [drawing.of_members(Random(seed), BOTH_CALLS, roles, left=1) for seed in range(50)]
    assert all(len({each.who[0] for each in scene.strikes}) == 1 for scene in one)


@pytest.mark.parametrize(
    ("strategy", "options", "is_elastic", "struck"),
    [
        ("all-reduce", {}, True, {"worker": 2}),
        ("diloco", {}, True, {"worker": 2}),
        ("ps-bsp", {"servers": 2, "replicas": 1}, True, {"worker": 2, "server": 1}),
        ("ps-bsp", {"servers": 2, "replicas": 1}, False, {"server": 1}),
        ("ps-ssp", {"servers": 2}, True, {"worker": 2}),
        ("gossip", {}, True, {"worker": 2}),
        ("ad-psgd", {}, True, {"worker": 2}),
        ("all-reduce", {"algorithm": "ring"}, True, {"worker": 2}),
        ("all-reduce", {"aggregate": "median"}, True, {"worker": 2}),
        ("all-reduce", {"aggregate": "fools-gold"}, True, {}),
        ("scaffold", {}, True, {"worker": 2}),
    ],
)
def test_the_roles_are_those_that_a_run_survives(strategy: str, options, is_elastic: bool, struck) -> None:
    roles = roles_of(build(strategy, options).traits, is_elastic=is_elastic, workers=3, at_least=1)
    assert {role.who: role.most for role in roles} == struck


def test_where_there_are_other_hosts_not_only_these_are_struck(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.running.chaos.drawing.KINDS", WITHOUT_LACKS)
    made = Campaign(script=SCRIPT, strategy=build("all-reduce", {}), workers=3, at_least=2, out=tmp_path / "out")
    others = [["worker-1", "worker-2"]]
    drawn = [made._drawn(Random(seed), CALLS, others, 5) for seed in range(100)]
    kinds = {strike.kind for scene in drawn for strike in scene.strikes}
    assert {"flicker", "slow", "kill", "stop", "cut", "full"} <= kinds
    assert not {"part", "node"} & kinds, "of three workers two would die"
    assert {"part", "node"} <= {
        strike.kind for seed in range(100) for strike in made._drawn(Random(seed), CALLS, [["worker-2"]], 5).strikes
    }


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"place": "has a result"}, "places are is between steps"),
        ({"place": "is asked"}, "places are is between steps"),
        ({"who": "server-0"}, "places are is asked"),
        ({"who": "clerk-0"}, "is no worker-N or server-N"),
        ({"kind": "sleep"}, "kinds kill, segfault"),
        ({"number": 0}, "is not to come"),
    ],
)
def test_a_schedule_that_could_strike_nobody_is_refused(tmp_path: Path, changed: dict, words: str) -> None:
    strike = {"who": "worker-0", "place": "has the result", "number": 1, "kind": "kill"}
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps({"runs": [{"strikes": [strike], "replacements": 0}]}))
    given = Schedule.read(path)
    servers = build("ps-bsp", {"servers": 2, "replicas": 1})
    made = Campaign(script=SCRIPT, strategy=servers, workers=2, out=tmp_path / "out")
    with pytest.raises(
        UsageError, match=r"worker-0, has the result .*: in these runs no others are struck than each server"
    ):
        next(made.runs(kills=1, given=given))
    with pytest.raises(UsageError, match="its places in these runs are is between steps"):
        next(replace(made, elastic=True).runs(kills=1, given=given))
    silent = Schedule((schedule.Scene((Strike("server-0", "is asked", 1, "stop"),)),))
    with pytest.raises(UsageError, match="a silent server is ended with --elastic alone"):
        silent.require(roles_of(servers.traits, is_elastic=False, workers=2, at_least=1))
    silent.require(roles_of(servers.traits, is_elastic=True, workers=2, at_least=1))
    path.write_text(json.dumps({"runs": [{"strikes": [{**strike, **changed}], "replacements": 0}]}))
    with pytest.raises(UsageError, match=words):
        Schedule.read(path)


def test_hosts_of_servers_are_struck_with_their_workers(monkeypatch) -> None:
    """A host dies where the run survives the loss of all that it has; servers without copies keep theirs alive."""
    monkeypatch.setattr("paceline.running.chaos.drawing.KINDS", WITHOUT_LACKS)

    def kinds(copies: int, *host: str, left: int = 5) -> dict[str, set[str]]:
        traits = build("ps-asp", {"servers": 3, "replicas": copies}).traits
        roles = roles_of(traits, is_elastic=True, workers=3, at_least=1)
        scenes = [drawing.of_host(Random(seed), BOTH_CALLS, roles, [host], left=left) for seed in range(200)]
        strikes = [strike for scene in scenes if scene is not None for strike in scene.strikes]
        assert all(strike.place in (SERVERS if strike.who[0] == "s" else UNDER_SERVERS).often for strike in strikes)
        return {who: {strike.kind for strike in strikes if strike.who == who} for who in {each.who for each in strikes}}

    mild, all_kinds = {"flicker", "slow"}, {"flicker", "slow", "part", "node"}
    assert kinds(1, "worker-1", "server-1") == {"worker-1": all_kinds, "server-1": all_kinds}
    assert kinds(1, "server-1") == {"server-1": all_kinds}
    assert kinds(1, "server-1", "server-2") == {"server-1": mild, "server-2": mild}
    assert kinds(2, "server-1", "server-2")["server-1"] == all_kinds
    assert kinds(1, "worker-1", "server-1", left=1)["worker-1"] == mild
    assert kinds(0, "worker-1", "server-1") == {"worker-1": mild}
    assert kinds(0, "server-1") == {}


def test_a_run_is_asked_to_grow_and_to_shrink(tmp_path: Path) -> None:
    """By who is beside the launcher; a run that is about to end refuses, which is no trouble of the worker's."""
    asked: list[object] = []

    def answer(request: object) -> str:
        asked.append(request)
        raise UsageError("the run is about to end")

    (tmp_path / "out").mkdir()
    grows = schedule.Scene((Strike("worker-0", "x", 1, "grow"), Strike("worker-1", "x", 2, "kill")))
    assert (grows.num_grown, grows.num_workers_dying) == (1, 1)
    striking.Sizes(grown=4, shrunk=2, servers=3).write(tmp_path)
    desk = Desk(tmp_path / "out", answer)
    done = threading.Event()

    def attend() -> None:
        while not done.is_set():
            desk.turn()
            done.wait(0.01)

    thread = threading.Thread(target=attend)
    thread.start()
    for kind in ("grow", "shrink", "more-servers"):
        with KINDS[kind].do(tmp_path):
            pass
    wanted = [{"do": "scale", "workers": 4}, {"do": "scale", "workers": 2}, {"do": "scale", "servers": 3}]
    while len(asked) < len(wanted):  # a server does not wait for the answer
        done.wait(0.01)
    done.set()
    thread.join()
    desk.close()
    assert asked == wanted


def test_a_host_without_a_link_or_a_part_of_ray_cannot_be_struck(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    with pytest.raises(UsageError, match="no part of Ray"):
        hosts.kill_node(tmp_path)
    monkeypatch.setattr(hosts.psutil, "net_if_stats", dict)
    with pytest.raises(UsageError, match="link is down already"):
        hosts.flicker(tmp_path)


def test_memory_runs_out_for_real(tmp_path: Path) -> None:
    """In a process of its own, which the limit is for."""
    child = os.fork()
    if not child:
        try:
            KINDS["memory"].do(tmp_path)
        except MemoryError as error:
            os._exit(5 if is_lack_of_memory(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_no_file_grows_on_a_full_disk(tmp_path: Path, monkeypatch) -> None:
    """What is as large as the largest file of the result directory cannot be written, while it is full."""
    folder, out = tmp_path, tmp_path / "out"
    for each in ("calls", "struck", "networks", "out"):
        (folder / each).mkdir()
    (out / "checkpoint.pt").write_bytes(bytes(100_000))
    strike = Strike("launcher", "place", 2, "full")
    (folder / "strikes.json").write_text(json.dumps([asdict(strike)]))

    class Writing:
        def write(self, size: int) -> None:
            (out / "other").write_bytes(bytes(size))

    monkeypatch.setenv(striking.VARIABLE, str(folder))
    striking.arm("launcher", {"place": (Writing, "write")})
    Writing().write(100_000)
    with pytest.raises(OSError, match="File too large"):
        Writing().write(100_000)
    Writing().write(100_000)
    assert striking.met([strike], folder) == (strike,)


def test_strikes_of_several_kinds_at_a_place_are_told_apart_and_met_in_order(tmp_path: Path, monkeypatch) -> None:
    """The launcher's disk is full at its first call and at its third, and the deadly strike there does not come."""
    for each in ("calls", "struck", "networks", "out"):
        (tmp_path / each).mkdir()
    (tmp_path / "out" / "checkpoint.pt").write_bytes(bytes(100_000))
    third, first = (Strike("launcher", "place", number, "full") for number in (3, 1))
    (tmp_path / "strikes.json").write_text(json.dumps([asdict(each) for each in (third, first)]))
    written: list[bool] = []

    class Writing:
        def write(self) -> None:
            with contextlib.suppress(OSError):
                written.append(False)
                (tmp_path / "out" / "other").write_bytes(bytes(100_000))
                written[-1] = True

    monkeypatch.setenv(striking.VARIABLE, str(tmp_path))
    striking.arm("launcher", {"place": (Writing, "write")})
    for _ in range(4):
        Writing().write()
    assert written == [False, True, False, True]
    others = [replace(first, kind="more-servers"), replace(first, kind="kill")]
    assert striking.met([*others, third, first], tmp_path) == (third, first)


def test_servers_that_join_are_struck_and_no_more_copies_die_than_a_run_survives(monkeypatch) -> None:
    """Beside as many as may die one that has no copy yet may; where the runs are not elastic nobody joins."""
    monkeypatch.setattr("paceline.running.chaos.drawing.KINDS", WITHOUT_LACKS)
    drawn = [drawing.of_servers(Random(seed), SERVER_CALLS, replace(SERVER, is_elastic=True)) for seed in range(300)]
    assert any(scene.num_servers_more for scene in drawn)
    assert any(scene.replacements for scene in drawn)
    struck = [strike for scene in drawn for strike in scene.strikes]
    assert {each.place for each in struck if each.is_deadly} >= {*SERVERS.at_a_move, *SERVERS.as_joiner}
    first_copies = {each.kind for each in struck if each.is_deadly and each.place in SERVERS.as_joiner}
    assert first_copies == {"kill", "stop", "hold"}, "with a segmentation fault it may live to have another copy"
    assert {each.who for each in struck if each.kind == "more-servers"} >= SERVER_CALLS.keys()
    for scene in drawn:
        deadly = {each.who for each in scene.strikes if each.is_deadly and each.place not in SERVERS.as_joiner}
        assert len(deadly) == 1
        if "server-3" in deadly:
            assert scene.num_servers_more, "else nobody would come"
    assert any("server-3" in {each.who for each in scene.strikes if each.is_deadly} for scene in drawn)
    still = [drawing.of_servers(Random(seed), SERVER_CALLS, SERVER) for seed in range(100)]
    assert not any(scene.replacements or scene.num_servers_more for scene in still)
    given = Schedule((schedule.Scene((Strike("server-0", "is asked", 1, "more-servers"),)),))
    with pytest.raises(UsageError, match="with --elastic alone, with which others may join"):
        given.require([SERVER])
    given.require([replace(SERVER, is_elastic=True)])


@pytest.mark.skipif(bool(connections.lack()), reason=connections.lack())
def test_a_connection_is_cut_and_no_other(tmp_path: Path, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cut, other = (socket.create_connection(listener.getsockname()) for _ in range(2))
        with cut, other:
            assert (cut.getsockname(), cut.getpeername()) in connections.own_connections()
            monkeypatch.setattr(connections, "own_connections", lambda: [(cut.getsockname(), cut.getpeername())])
            KINDS["cut"].do(tmp_path)
            assert other.send(b".") == 1
            with pytest.raises(ConnectionError):
                cut.send(b".")


@pytest.mark.parametrize(
    ("strategy", "options", "given", "words"),
    [
        (
            "all-reduce",
            {"aggregate": "fools-gold"},
            {},
            "chaos strikes workers under all-reduce, local updates, rounds of clients, gossip, ad-psgd",
        ),
        ("ps-bsp", {"servers": 2, "replicas": 1}, {"global_batch": "keep"}, "--global-batch has no effect under"),
        (
            "ps-bsp",
            {"servers": 2, "combine": "always"},
            {},
            "servers with replicas=R, more than R",
        ),
        ("all-reduce", {}, {"at_least": 3}, "--at-least 3 of --workers 3 leaves nobody to be struck"),
        ("ps-bsp", {"servers": 2, "replicas": 1}, {"at_least": 1}, "--at-least has no effect under ps-bsp"),
        ("diloco", {}, {"max_steps": 9}, "--max-steps under diloco: runs would end with other samples"),
        ("fed-avg", {}, {}, "strategy fed-avg: give --max-steps, and have the script train for longer"),
        ("fed-avg", {"aggregate": "fools-gold"}, {"max_steps": 9}, "chaos strikes workers under all-reduce"),
        (
            "ps-bsp",
            {"servers": 2, "replicas": 1},
            {"elastic": True, "max_steps": 9},
            "--max-steps under ps-bsp, of whose workers some die: runs would",
        ),
    ],
)
def test_what_cannot_be_struck(tmp_path: Path, strategy: str, options, given, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Campaign(script=SCRIPT, strategy=build(strategy, options), workers=3, out=tmp_path / "out", **given)


def test_the_next_run_begins_when_a_host_that_was_struck_is_there_again(monkeypatch) -> None:
    """Ray lists the dead node for a while, and then the new one beside it."""
    dead, new, other = (nodes.Node(name, address, 1.0, 0.0) for name, address in (("a", "1"), ("b", "1"), ("c", "2")))
    listed = iter([[dead, other], [other], [dead, new, other], [new, other]])
    monkeypatch.setattr(nodes, "nodes", lambda: next(listed))
    monkeypatch.setattr(nodes.Node, "answers", property(lambda node: node.node_id != "a"))
    monkeypatch.setattr(nodes, "_LOOK_S", 0.0)
    nodes.await_hosts(["1", "2"], within_s=60)
    assert next(listed, None) is None
    monkeypatch.setattr(nodes, "nodes", lambda: [dead])
    with pytest.raises(RunFailed, match="Ray has no node at 2, and lists some that do not answer: 1"):
        nodes.await_hosts(["1", "2"], within_s=0)
