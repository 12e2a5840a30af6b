"""What is drawn for runs that are struck, and how these are judged: from files, without a run."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import threading
from dataclasses import asdict, fields, replace
from pathlib import Path
from random import Random

import pytest
import torch

from paceline.engines import striking
from paceline.engines.ray import nodes
from paceline.engines.requests import Desk
from paceline.engines.scripting import Script, is_lack_of_memory
from paceline.engines.striking import KINDS, SERVERS, Strike, acts, connections, hosts
from paceline.errors import RunFailed, UsageError
from paceline.records import UpdateRecord
from paceline.running.chaos import Campaign, Schedule, counts, drawing, gradients, judging, launcher, runs, schedule
from paceline.running.chaos.program import AMONG_WORKERS, IN_PAIRS, UNDER_SERVERS
from paceline.running.chaos.roles import Role, roles_of
from paceline.strategies import build
from paceline.training.snapshot import as_model_file

CALLS = {f"worker-{rank}": dict.fromkeys(AMONG_WORKERS.often, 20) for rank in range(3)}
SCRIPT = Script("train.py", "", (), "/tmp", ())
WITHOUT_LACKS = {name: replace(kind, lacks=lambda: "") for name, kind in KINDS.items()}
SERVER_CALLS = {f"server-{index}": dict.fromkeys(SERVERS.often, 20) for index in range(3)}
BOTH_CALLS = {f"worker-{rank}": dict.fromkeys(UNDER_SERVERS.often, 20) for rank in range(3)} | SERVER_CALLS
WORKER, SERVER = Role("worker", AMONG_WORKERS, 2), Role("server", SERVERS, 1, is_elastic=False)


def test_places_are_there() -> None:
    places = [AMONG_WORKERS.all, UNDER_SERVERS.all, IN_PAIRS.all, SERVERS.all, launcher.PLACES]
    for owner, name in [place for each in places for place in each.values()]:
        assert callable(getattr(owner, name))


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
        ("all-reduce", {"algorithm": "ring"}, True, {}),
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


def test_a_schedule_that_struck_nobody_is_no_success(tmp_path: Path, monkeypatch) -> None:
    """Runs are files here: one undisturbed, and one that ended before its strike."""
    scene = schedule.Scene((Strike("worker-0", "has the result", 99, "kill"),))
    monkeypatch.setattr(runs.Runs, "make", lambda self, name, scene: run(self.out / name, steps={1: [0]}))
    monkeypatch.setattr("paceline.running.chaos.campaign.connected", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("paceline.running.chaos.campaign.nodes", list)
    made = Campaign(script=SCRIPT, strategy=build("all-reduce", {}), workers=2, out=tmp_path / "out")
    made.out.mkdir()
    struck = made.runs(kills=1, given=Schedule((scene,)))
    assert next(struck).met == ()
    with pytest.raises(RunFailed, match="no run came to where the schedule strikes"):
        next(struck)


def run(folder: Path, *, steps: dict[int, list[int]], weight: float = 1.0, lost: tuple[str, ...] = ()) -> Path:
    """The files of a run of two workers."""
    for each in ("calls", "committed", "networks", "out"):
        (folder / each).mkdir(parents=True)
    for rank in range(2):
        lines = [json.dumps([number, samples, "alike"]) + "\n" for number, samples in steps.items()]
        (folder / "committed" / f"worker-{rank}").write_text("".join(lines) + "[5, [1")
    (folder / "out" / "model.safetensors").write_bytes(as_model_file({"w": torch.full((4,), weight)}))
    events = [{"name": "lost", "who": who, "iteration": 1, "time_s": 0.0, "details": {}} for who in ("worker-0", *lost)]
    (folder / "out" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_all_on_a_host_are_lost_with_it(tmp_path: Path) -> None:
    """Nobody of the launcher's is struck there."""
    whole = run(tmp_path / "whole", steps={1: [0]}, lost=("worker-2",))
    for who, network in (("launcher", "1"), ("worker-0", "2"), ("worker-1", "1"), ("worker-2", "2")):
        (whole / "networks" / who).write_text(network)
    assert judging.on_other_hosts(whole) == [["worker-0", "worker-2"]]
    assert judging.losses(whole, [Strike("worker-2", "x", 1, "node")]) == []
    strikes = [Strike("worker-2", "x", 1, "node"), Strike("worker-1", "x", 1, "flicker")]
    assert judging.dying(whole, strikes) == {"worker-0", "worker-2"}
    assert judging.losses(whole, [Strike("worker-2", "x", 1, "kill")]) == ["worker-0 was lost, and not struck"]
    given = Schedule((schedule.Scene((Strike("worker-2", "has the result", 1, "part"),)),))
    schedule.require_hosts(given, [["worker-2"]])
    with pytest.raises(UsageError, match="hosts are struck where those of the run"):
        schedule.require_hosts(given, [])


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


def test_rows_of_tables_are_compared_with_the_model(tmp_path: Path) -> None:
    whole, other, fewer = (run(tmp_path / name, steps={1: [0]}) for name in ("whole", "other", "fewer"))
    for folder, rows in ((whole, [3.0, 0.0]), (other, [3.0, 4.0]), (fewer, [3.0])):
        tensors = {"t.keys": torch.arange(len(rows)), "t.rows": torch.tensor(rows)}
        (folder / "out" / "rows.safetensors").write_bytes(as_model_file(tensors))
    assert judging.distance(other, whole) == pytest.approx(4 / 13**0.5)
    assert judging.distance(fewer, whole) == float("inf")


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


def test_losses_are_found(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", steps={2: [0, 1], 4: [2, 3]})
    right = run(tmp_path / "right", steps={3: [0, 1, 2], 4: [3]})
    assert judging.samples(right, whole) == []
    assert judging.losses(right, [Strike("worker-0", "x", 1, "kill"), Strike("worker-1", "x", 1, "pause")]) == []
    assert judging.distance(right, whole) == 0.0
    wrong = run(tmp_path / "wrong", steps={2: [0, 1], 4: [2, 2]}, weight=1.01, lost=("worker-2",))
    (told,) = judging.samples(wrong, whole)
    assert told == "2 samples count otherwise: sample 2 counts 2 times, and 1 times in the undisturbed run"
    assert judging.distance(wrong, whole) == pytest.approx(0.01, rel=1e-3)
    assert judging.losses(wrong, [Strike("worker-1", "x", 1, "stop")]) == [
        "worker-0 was lost, and not struck",
        "worker-2 was lost, and not struck",
        "worker-1 was struck, and its loss not noticed",
    ]
    event = {"name": "given_up", "who": "worker-3", "iteration": 4, "time_s": 0.0, "details": {}}
    with (right / "out" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    strikes = [Strike("worker-0", "x", 1, "kill"), Strike("worker-3", "takes a state", 1, "stop")]
    assert judging.losses(right, strikes) == [], "the run ended before the joiner's silence was noticed"
    details = {"process": 5, "why": "its script came to its end before it had a batch"}
    event = {**event, "name": "not_joined", "who": "worker-4", "details": details}
    with (right / "out" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert judging.losses(right, strikes) == [], "the others were through with their data"
    (wrong / "committed" / "worker-1").write_text('[2, [0, 7], "other"]\n')
    assert "worker-1 has other samples in step 2" in judging.samples(wrong, whole)
    assert "worker-1 has another model at step 2" in judging.samples(wrong, whole)
    bounds = [judging.bound(build(*each).traits, workers_die=True) for each in (("all-reduce", {}), ("local-sgd", {}))]
    assert bounds == [1e-3, float("inf")]
    copies = build("ps-bsp", {"servers": 2, "replicas": 1}).traits
    assert [judging.bound(copies, workers_die=die) for die in (False, True)] == [0.0, 1e-3]


def test_a_launcher_whose_death_or_full_disk_nobody_tells(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    said = tmp_path / "out" / "output.txt"
    said.write_text("the launcher was killed; another one goes on: resumed\n")
    strikes = [Strike("launcher", launcher.WRITES, 4, "full"), Strike("launcher", launcher.WRITES, 5, "kill")]
    assert judging.launcher(tmp_path, strikes) == ["nothing says 'what was there before is intact'"]
    said.write_text("cannot write checkpoint.pt: File too large; what was there before is intact\n")
    assert judging.launcher(tmp_path, strikes) == ["nothing says 'the launcher was killed; another one goes on'"]


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


def numbered(lines: str) -> str:
    """What servers count, an entry of the chain each."""
    return "".join(f"{line} {number}\n" for number, line in enumerate(lines.splitlines(), start=1))


def test_gradients_that_count_otherwise_are_found(tmp_path: Path) -> None:
    """Two key ranges with a copy each, and two gradients; what a dead server has counted last does not matter."""
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    for folder in (whole, struck):
        (folder / "counted").mkdir(parents=True)
        for name in ("server-0", "server-1"):
            (folder / "counted" / name).write_text(numbered("0 0 0 1\n0 0 1 1\n1 0 0 1\n1 0 1 1\n"))
    (struck / "counted" / "server-0").write_text(numbered("0 0 0 1\n"))
    dead = [Strike("server-0", "is asked", 1, "kill")]
    assert gradients.counted_alike(struck, whole, dead) == []
    (struck / "counted" / "server-1").write_text(numbered("0 0 0 1\n0 0 0 1\n0 0 1 1\n1 0 0 1\n"))
    told = "2 gradients count otherwise on server-1: gradient 1 of worker 0 counts 2 times in key range 0"
    assert gradients.counted_alike(struck, whole, dead) == [told]


def outlived(
    folder: Path,
    *,
    pushed: dict[str, list],
    counted: dict[str, str],
    iteration: int,
    left_over=False,
    let_go: dict[str, int] | None = None,
) -> Path:
    """The files of a run whose workers and servers may die, of two key ranges."""
    for each in ("pushed", "counted", "out"):
        (folder / each).mkdir(parents=True)
    for who, lines in pushed.items():
        (folder / "pushed" / who).write_text("".join(json.dumps(line) + "\n" for line in lines) + "[9, [")
    for who, lines in counted.items():
        (folder / "counted" / who).write_text(numbered(lines))
    event = {"who": "run", "iteration": iteration, "time_s": 0.0, "details": {}}
    events = [{"name": "ended", **event}, *([{"name": "left_over", **event}] if left_over else [])]
    events += [{**event, "name": "let_go", "who": who, "details": {"steps": n}} for who, n in (let_go or {}).items()]
    (folder / "out" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_steps_that_count_otherwise_are_found(tmp_path: Path) -> None:
    """Worker 1 dies with its second step, which nobody has, and worker 0 does that one's batch."""
    steps = {"worker-0": [[1, [0, 1]], [2, [2, 3]]], "worker-1": [[1, [4, 5]], [2, [6, 7]]]}
    whole = outlived(tmp_path / "whole", pushed=steps, counted={}, iteration=4)
    assert gradients.of_steps(whole, whole) == []
    taken = {**steps, "worker-0": [*steps["worker-0"], [3, [6, 7]]]}
    for iteration in (4, 5):  # others may have heard of the lost one
        folder = tmp_path / f"right-{iteration}"
        right = outlived(folder, pushed=taken, counted={}, iteration=iteration, let_go={"worker-1": 1})
        assert gradients.of_steps(right, whole) == []
    twice = outlived(tmp_path / "twice", pushed=taken, counted={}, iteration=3, let_go={"worker-1": 2})
    assert gradients.of_steps(twice, whole) == [
        "2 samples count otherwise: sample 6 counts 2 times, and 1 times in the undisturbed run",
        "there are 3 iterations; of 5 steps that count and 5 in all follow as many",
    ]
    for is_told, num_wrong in ((False, 1), (True, 0)):
        folder = tmp_path / f"left-{is_told}"
        lacking = outlived(folder, pushed=steps, counted={}, iteration=3, let_go={"worker-1": 1}, left_over=is_told)
        assert len(gradients.of_steps(lacking, whole)) == num_wrong


def test_samples_that_count_otherwise_where_both_may_die_are_found(tmp_path: Path) -> None:
    """Worker 1 dies with its second gradient, and worker 0 does that one's batch."""
    both = "0 0 0 0\n0 0 1 0\n{}1 0 0 0\n1 0 1 0\n{}"
    all_of = {"server-0": both.format("0 0 0 1\n0 0 1 1\n", "1 0 0 1\n1 0 1 1\n")}
    pushed = {"worker-0": [[0, [0, 1]], [1, [2, 3]]], "worker-1": [[0, [4, 5]], [1, [6, 7]]]}
    whole = outlived(tmp_path / "whole", pushed=pushed, counted=all_of, iteration=4)
    assert gradients.of_samples(whole, whole, [], unit="gradient", keeps=False) == []
    taken = {"worker-0": [*pushed["worker-0"], [2, [6, 7]]], "worker-1": pushed["worker-1"]}
    left = {name: lines.replace("0 1 1\n", "0 0 2\n") for name, lines in all_of.items()} | {"server-1": "0 0 7 7\n"}
    right = outlived(tmp_path / "right", pushed=taken, counted=left, iteration=3)
    dead = [Strike("server-1", "is asked", 1, "kill"), Strike("worker-1", "pushes", 2, "kill")]
    assert gradients.of_samples(right, whole, dead, unit="update", keeps=False) == []
    told = "there are 3 updates of 4 gradients; 4 to 4 are right"
    assert gradients.of_samples(right, whole, dead, unit="gradient", keeps=False) == [told]
    twice = outlived(
        tmp_path / "twice", pushed=taken, counted={"server-0": all_of["server-0"] + "1 0 0 2\n"}, iteration=5
    )
    assert gradients.of_samples(twice, whole, dead, unit="gradient", keeps=False) == [
        "1 gradients count otherwise on server-0: gradient 2 of worker 0 counts 0 times in key range 0",
        "2 samples count otherwise: sample 6 counts 2 times, and 1 times in the undisturbed run",
    ]
    for is_told, words in ((False, ["sample 6 counts 0 times, and 1 times"]), (True, [])):
        folder = tmp_path / f"left-{is_told}"
        less = {name: lines.replace("0 0 1 1\n", "").replace("1 0 1 1\n", "") for name, lines in all_of.items()}
        lacking = outlived(folder, pushed=pushed, counted=less, iteration=3, left_over=is_told)
        found = gradients.of_samples(lacking, whole, dead, unit="gradient", keeps=False)
        assert len(found) == len(words)
        assert all(word in line for word, line in zip(words, found, strict=True))
    unknown = outlived(tmp_path / "unknown", pushed={"worker-0": []}, counted={"server-0": "0 0 0 0\n"}, iteration=1)
    found = gradients.of_samples(unknown, whole, [], unit="update", keeps=False)
    assert "gradient 0 of worker 0 counts, and was not pushed" in found
    assert "nothing counts in key range 1 on any server that is left" in found


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


def test_a_silent_server_without_a_copy_may_outlive_the_run(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    events = [moved("server_joined", "server-2"), moved("server_joined", "server-3"), moved("copied", "server-3")]
    (tmp_path / "out" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    strikes = [Strike(f"server-{number}", "is given a copy", 1, "stop") for number in (2, 3)]
    assert judging.losses(tmp_path, strikes) == ["server-3 was struck, and its loss not noticed"]
    killed = [Strike("server-2", "is given a copy", 1, "kill")]
    assert judging.losses(tmp_path, killed) == ["server-2 was struck, and its loss not noticed"]


def moved(name: str, who: str, key_range: int = 0) -> dict:
    return {"name": name, "who": who, "iteration": 1, "time_s": 0.0, "details": {"key_range": key_range}}


def test_copies_that_were_made_later_are_made_of_what_their_givers_had(tmp_path: Path) -> None:
    """Server 0 has given its copy to server 1 and died, which has given it to server 2 and let go, and has it again."""

    def made_of(of_second: str, *events: dict) -> dict[str, list[tuple[int, int]]]:
        for each in ("counted", "out"):
            (tmp_path / each).mkdir(exist_ok=True)
        first = "0 0 0 0 1\n0 0 0 1 2\n0 0 0 2 3\n"
        second = f"0 from 0 2 100\n{of_second}0 from 2 3 300\n0 0 0 3 4\n"
        third = "0 from 1 3 200\n0 0 0 3 4\n"
        for number, lines in enumerate((first, second, third)):
            (tmp_path / "counted" / f"server-{number}").write_text(lines)
        (tmp_path / "out" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        told = counts.read(tmp_path / "counted")
        held = sorted(counts.holders(told, tmp_path / "out"))
        return {
            server: sorted(
                gradient for (_, gradient), n in counts.counted(told, server, key_range).items() for _ in range(n)
            )
            for server, key_range in held
        }

    events = [moved("copied", "server-1"), moved("copied", "server-2"), moved("released", "server-1")]
    assert made_of("0 0 0 2 3\n", *events).keys() == {"server-0", "server-2"}
    events.append(moved("copied", "server-1"))
    right = [(0, 0), (0, 1), (0, 2), (0, 3)]
    found = made_of("0 0 0 2 3\n", *events)
    assert found == {"server-0": right[:3], "server-1": right, "server-2": right}
    lost, twice = made_of("", *events), made_of("0 0 0 1 3\n0 0 0 2 3\n", *events)
    assert lost["server-2"] == [(0, 0), (0, 1), (0, 3)]
    assert twice["server-1"] == [(0, 0), (0, 1), (0, 1), (0, 2), (0, 3)]


def test_what_servers_without_copies_count_is_in_the_records(tmp_path: Path) -> None:
    """Each has a file that it would write to, if it had a copy of another one's."""
    pushed = {"worker-0": [[0, [0, 1]], [1, [2, 3]]]}
    whole, twice = (outlived(tmp_path / name, pushed=pushed, counted={"server-0": ""}, iteration=2) for name in "ab")
    for folder, last in ((whole, 1), (twice, 0)):
        rows = [f"0,{update},0,{clock},0" for update, clock in ((1, 0), (2, last))]
        names = [field.name for field in fields(UpdateRecord)]
        (folder / "out" / "updates.csv").write_text("\n".join([",".join(names), *rows]) + "\n")
    assert gradients.of_samples(whole, whole, [], unit="gradient", keeps=False) == []
    assert (
        "1 gradients count otherwise on server-0"
        in gradients.of_samples(twice, whole, [], unit="gradient", keeps=False)[0]
    )


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


def test_a_model_that_is_not_finite_is_wrong(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", steps={1: [0]})
    destroyed = run(tmp_path / "destroyed", steps={1: [0]}, weight=float("nan"))
    far = judging.distance(destroyed, whole)
    for each in (("all-reduce", {}), ("local-sgd", {}), ("ps-bsp", {"servers": 2, "replicas": 1})):
        traits = build(*each).traits
        assert judging.apart(0.0, traits, workers_die=False) == []
        assert "the model is nan from the undisturbed run's" in judging.apart(far, traits, workers_die=False)[0]
    assert judging.apart(0.002, build("all-reduce", {}).traits, workers_die=True)


def test_descriptors_that_stay_open_are_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(judging, "_GRACE_S", 0.0)
    gc.collect()
    before = judging.num_descriptors()
    assert judging.left(tmp_path, before) == []
    with contextlib.ExitStack() as files:
        for number in range(100):  # more than what other tests have left may close meanwhile
            files.enter_context((tmp_path / str(number)).open("w"))
        (told,) = judging.left(tmp_path, before)
    assert 50 < int(told.removesuffix(" descriptors more are open than before the run")) < 150


@pytest.mark.parametrize(
    ("strategy", "options", "given", "words"),
    [
        (
            "all-reduce",
            {"algorithm": "ring"},
            {},
            "strategy ring: chaos strikes workers under all-reduce, local updates, gossip, ad-psgd",
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
