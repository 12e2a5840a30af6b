"""How runs that were struck are judged: from files, without a run."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.checkpoint import Checkpoint, WorkerState
from paceline.engines.scripting import Script
from paceline.engines.striking import Strike
from paceline.errors import RunFailed, UsageError
from paceline.records import UpdateRecord
from paceline.running.chaos import Campaign, Schedule, counts, gradients, judging, launcher, runs, schedule
from paceline.strategies import build
from paceline.training.snapshot import as_model_file

SCRIPT = Script("train.py", "", (), "/tmp", ())


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


def test_a_campaign_ends_when_the_hosts_that_its_last_run_struck_are_there_again(tmp_path: Path, monkeypatch) -> None:
    """As each run begins when those of the one before are."""
    log: list[str] = []

    def make(self: runs.Runs, name: str, scene: schedule.Scene) -> Path:
        log.append(name)
        folder = run(self.out / name, steps={1: [0]})
        (folder / "struck").mkdir()
        for strike in scene.strikes:
            (folder / "struck" / strike.mark).touch()
        for who, network in (("launcher", "1"), ("worker-0", "2"), ("worker-1", "1")):
            (folder / "networks" / who).write_text(network)
        return folder

    monkeypatch.setattr(runs.Runs, "make", make)
    monkeypatch.setattr("paceline.running.chaos.campaign.connected", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("paceline.running.chaos.campaign.nodes", list)
    monkeypatch.setattr("paceline.running.chaos.campaign.await_hosts", lambda hosts, *, within_s: log.append("hosts"))
    made = Campaign(script=SCRIPT, strategy=build("all-reduce", {}), workers=2, out=tmp_path / "out")
    made.out.mkdir()
    scenes = [schedule.Scene((Strike("worker-0", "has the result", 1, kind),)) for kind in ("node", "kill", "node")]
    assert len([*made.runs(kills=1, given=Schedule(tuple(scenes)))]) == 3
    assert log == ["undisturbed", "run-1", "hosts", "run-2", "run-3", "hosts"]


@pytest.mark.parametrize(
    ("strategy", "elastic", "told", "bound"),
    [
        ("all-reduce", False, ["--elastic", "1:3", "--global-batch", "keep"], 1e-3),
        ("gossip", False, ["--elastic", "1:3", "--global-batch", "grow"], float("inf")),
        ("ps-bsp:servers=2:replicas=1", True, ["--elastic", "1:3", "--global-batch", "grow"], float("inf")),
        ("ps-bsp:servers=2:replicas=1", False, [], 0.0),
    ],
)
def test_a_launcher_is_struck_of_a_run_that_is_elastic_as_the_others_are(
    tmp_path: Path, monkeypatch, strategy: str, elastic: bool, told: list[str], bound: float
) -> None:
    """Its workers end with it, so that the model is as near as where workers die."""
    given: list[object] = []

    def begin(words: list[object], *, out: Path, patience_s: float) -> None:
        given.extend(words)
        run(out.parent, steps={})
        (out / "output.txt").write_text("the launcher was killed; another one goes on: resumed")
        scene = schedule.Scene((Strike("launcher", launcher.WRITES, 1, "kill"),))
        (out.parent / "struck" / scene.strikes[0].mark).touch()

    monkeypatch.setattr(launcher, "run", begin)
    monkeypatch.setattr(runs, "connected_to", lambda: "1.2.3.4:5")
    monkeypatch.setattr(runs.Runs, "make", lambda self, name, scene: run(self.out / name, steps={}))
    monkeypatch.setattr("paceline.running.chaos.campaign.Result", lambda out: SimpleNamespace(iteration=20))
    monkeypatch.setattr("paceline.running.chaos.campaign.connected", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("paceline.running.chaos.campaign.nodes", list)
    made = Campaign(script=SCRIPT, strategy=build(strategy), workers=3, elastic=elastic, out=tmp_path / "out")
    made.out.mkdir()
    scene = schedule.Scene((Strike("launcher", launcher.WRITES, 1, "kill"),))
    (struck,) = made.runs(kills=1, given=Schedule((scene,)))
    assert (struck.num_died, struck.bound, struck.wrong) == (1, bound, ())
    first = given.index("--elastic") if told else len(given)
    assert given[first : first + len(told)] == told


def rounds(folder: Path, *made_of: list[int]) -> Path:
    run(folder, steps={})
    for rank in range(2):
        lines = [json.dumps([number, each, "alike"]) + "\n" for number, each in enumerate(made_of, start=1)]
        (folder / "committed" / f"worker-{rank}").write_text("".join(lines[: 3 - rank]))
    return folder


def test_rounds_of_other_clients_are_found(tmp_path: Path) -> None:
    """A worker that has died has fewer rounds, which others have."""
    whole = rounds(tmp_path / "whole", [6, 60, 15], [6, 66, 17])
    assert judging.rounds(rounds(tmp_path / "right", [6, 60, 15], [6, 66, 17]), whole) == []
    wrong = rounds(tmp_path / "wrong", [6, 60, 15], [7, 76, 20])
    told = "round 2 is of 7 clients, 76 samples and 20 batches, and of 6 clients, 66 samples and 17 batches"
    assert judging.rounds(wrong, whole) == [f"{told} in the undisturbed run"]
    (told,) = judging.rounds(rounds(tmp_path / "short", [6, 60, 15]), whole)
    assert told.startswith("round 2 is of 0 clients")
    (wrong / "committed" / "worker-1").write_text('[1, [6, 60, 15], "other"]\n')
    assert "worker-1 has another model at step 1" in judging.rounds(wrong, whole)
    assert judging.bound(build("fed-avg", {}).traits, workers_die=True) == 1e-3


def keep(folder: Path, *own: dict[str, torch.Tensor]) -> None:
    """A checkpoint of workers with these states."""
    workers = [WorkerState(rank, 0, 0, 0, {}, own=each) for rank, each in enumerate(own)]
    found = Checkpoint(1, 0.0, model={}, optimizer={}, groups=[], workers=workers, seed=0)
    (folder / "out" / "checkpoint.pt").write_bytes(found.encode())


def test_what_clients_keep_is_compared_and_private_layers_of_the_model_are_not(tmp_path: Path) -> None:
    """Wherever it lies."""
    whole, moved, other, fewer = (rounds(tmp_path / name) for name in ("whole", "moved", "other", "fewer"))
    first, second = ({f"client.{number}.control.0": torch.full((4,), 1.0)} for number in range(2))
    keep(whole, {"initial.p": torch.zeros(1), **first, **second})
    keep(moved, {"initial.p": torch.zeros(1), **second}, first)
    keep(other, {**first, "client.1.control.0": torch.zeros(4)})
    keep(fewer, first)
    (moved / "out" / "model.safetensors").write_bytes(as_model_file({"w": torch.full((4,), 1.01), "p": torch.ones(1)}))
    for each in (whole, other, fewer):
        (each / "out" / "model.safetensors").write_bytes(as_model_file({"w": torch.ones(4), "p": torch.zeros(1)}))
    assert judging.distance(moved, whole, has_clients=True) == pytest.approx(0.01, rel=1e-3)
    assert judging.kept(moved, whole) == []
    assert judging.kept(other, whole) == ["what clients keep is 0.71 from the undisturbed run's, and may be 0.02"]
    assert judging.kept(fewer, whole) == ["what clients keep is inf from the undisturbed run's, and may be 0.02"]


def run(folder: Path, *, steps: dict[int, list[int]], weight: float = 1.0, lost: tuple[str, ...] = ()) -> Path:
    """The files of a run of two workers."""
    for each in ("calls", "committed", "networks", "out"):
        (folder / each).mkdir(parents=True, exist_ok=True)
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


def test_rows_of_tables_are_compared_with_the_model(tmp_path: Path) -> None:
    whole, other, fewer = (run(tmp_path / name, steps={1: [0]}) for name in ("whole", "other", "fewer"))
    for folder, rows in ((whole, [3.0, 0.0]), (other, [3.0, 4.0]), (fewer, [3.0])):
        tensors = {"t.keys": torch.arange(len(rows)), "t.rows": torch.tensor(rows)}
        (folder / "out" / "rows.safetensors").write_bytes(as_model_file(tensors))
    assert judging.distance(other, whole) == pytest.approx(4 / 13**0.5)
    assert judging.distance(fewer, whole) == float("inf")


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
    several = (("all-reduce", {}), ("all-reduce", {"aggregate": "median"}), ("local-sgd", {}))
    bounds = [judging.bound(build(*each).traits, workers_die=True) for each in several]
    assert bounds == [1e-3, float("inf"), float("inf")]
    assert judging.bound(build("all-reduce", {"aggregate": "median"}).traits, workers_die=False) == 1e-3
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


def test_a_copy_that_counts_nothing_is_wrong(tmp_path: Path) -> None:
    """One of two servers' is empty, or one shard of it; or a third server, which was given one, says nothing."""
    lines = "0 0 0 0\n0 1 0 0\n0 0 0 1\n0 1 0 1\n"
    pushed = {"worker-0": [[0, [0, 1]], [1, [2, 3]]]}

    def told(name: str, second: str, *events: dict, third: str = "", strikes: Sequence[Strike] = ()) -> list[str]:
        counted = {"server-0": lines, "server-1": second}
        folder = outlived(tmp_path / name, pushed=pushed, counted=counted, iteration=2)
        (folder / "counted" / "server-2").write_text(third)
        with (folder / "out" / "events.jsonl").open("a") as file:
            file.write("".join(json.dumps(event) + "\n" for event in events))
        of_samples = gradients.of_samples(folder, tmp_path / "whole", strikes, unit="gradient", keeps=False)
        assert gradients.counted_alike(folder, tmp_path / "whole", strikes) == of_samples
        return of_samples

    assert told("whole", lines) == []
    assert told("empty", "") == [
        "4 gradients count otherwise on server-1: gradient 0 of worker 0 counts 0 times in key range 0"
    ]
    assert told("shard", lines.replace("0 1 0 0\n", "").replace("0 1 0 1\n", ""))[0].startswith("2 gradients count")
    assert told("dead", "", strikes=[Strike("server-1", "is asked", 1, "kill")]) == []
    assert told("let go", "", moved("released", "server-1")) == []
    assert told("given", "", moved("released", "server-1"), moved("copied", "server-2"), third="0 from 0 9 9\n") == []
    silent, counts_nothing = told("silent", lines, moved("copied", "server-2"))
    assert silent == "server-2 is said to have been given a copy of key range 0, and has not written that down"
    assert counts_nothing.startswith("4 gradients count otherwise on server-2")


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
        held = sorted(counts.holders(counts.at_start(told), tmp_path / "out"))
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


def test_a_model_that_is_not_finite_is_wrong(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", steps={1: [0]})
    destroyed = run(tmp_path / "destroyed", steps={1: [0]}, weight=float("nan"))
    far = judging.distance(destroyed, whole)
    for each in (("all-reduce", {}), ("local-sgd", {}), ("ps-bsp", {"servers": 2, "replicas": 1})):
        bound = judging.bound(build(*each).traits, workers_die=False)
        assert judging.apart(0.0, bound) == []
        assert "the model is nan from the undisturbed run's" in judging.apart(far, bound)[0]
    assert judging.apart(0.002, judging.bound(build("all-reduce", {}).traits, workers_die=True))


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
