"""Studies on the virtual engine: real ones, of a script that trains next to nothing."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import pandas as pd
import pytest
from rich.console import Console

from paceline import Result, Study
from paceline.errors import UsageError
from paceline.lab import losses, report_page, runner
from paceline.strategies import STRATEGIES, Entry
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Context, Replica, Strategy, Synchronizer, option
from paceline.strategies.traits import AllReduced, Traits

CLUSTER = """
[[hosts]]
count = 4
bandwidth_gbit_per_s = 1.0
latency_us = 0.0
[compute]
step_s = 50.0
"""
STEPS, EVAL_EVERY = 12, 4
SCRIPT = f"""
import paceline
import torch

worker = paceline.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(3 * {STEPS}, 2), batch_size=3)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
evaluations = iter(range(100))


@worker.evaluation
def evaluate(model):
    return {{"count": float(next(evaluations))}}


for batch in loader:
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Study]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "slow.toml").write_text(CLUSTER)

    def go(**settings: Any) -> Study:
        given: dict[str, Any] = {"strategies": ["all-reduce", "ps-asp"], "workers": [1, 2], "seeds": 1}
        given |= {"engine": "virtual", "cluster": tmp_path / "slow.toml", "eval_every": EVAL_EVERY, "device": "cpu"}
        return Study.run(tmp_path / "train.py", **{**given, "out": tmp_path / "out", **settings})

    return go


def test_times_are_of_the_simulated_clock(run: Callable[..., Study], tmp_path: Path) -> None:
    """A step takes 50 seconds there, and none of them here."""
    study = run()
    trials = study.frames.trials.set_index("trial")
    assert set(trials["status"]) == {"finished"}
    assert set(zip(trials["engine"], trials["cluster"], strict=True)) == {("virtual", "slow")}
    assert set(study.frames.summary["cluster"]) == {"slow"}
    assert trials.loc["all-reduce-n1-s0", "training_time_s"] == pytest.approx(STEPS * 50.0)
    results = [Result(runner.directory_of(tmp_path / "out", trial)) for trial in study.spec.trials]
    assert all(result.is_virtual for result in results)
    assert sum(outcome.wall_s for outcome in runner.outcomes(tmp_path / "out", study.spec.trials).values()) < 60
    again = run(out=tmp_path / "again").frames
    for name in ("trials", "evaluations", "workers", "staleness", "pace", "summary"):
        left, right = getattr(study.frames, name), getattr(again, name)
        pd.testing.assert_frame_equal(left.drop(columns="study"), right.drop(columns="study"), check_exact=True)


def test_the_report_says_what_judging_asynchronous_workers_cost(run: Callable[..., Study], tmp_path: Path) -> None:
    """Simulated time knows nothing of a copy. Of 12 batches in all, every second is to be judged. Rank 0 looks
    after its own steps, so that some come late; the first and the last are judged in pauses, which come anyway."""
    (tmp_path / "slow.toml").write_text(CLUSTER.replace("50.0", "0.5"))
    study = run(strategies=["ps-asp"], workers=[2], eval_every=2)
    assert study.frames.evaluations["iteration"].tolist() == [0, 2, 5, 6, 8, 10, 12]
    kept = "5 copies, which took 0.00% of a run at most"
    assert report_page.page_of(study).facts["Models kept to be judged"] == kept


def test_every_run_is_under_attack(run: Callable[..., Study], tmp_path: Path) -> None:
    study = run(strategies=["all-reduce"], workers=[1, 3], attack="sign-flip")
    assert [(out.variant.text, out.workers) for out in study.spec.left_out] == [("all-reduce", 1)]
    (trial,) = study.spec.trials
    result = Result(runner.directory_of(tmp_path / "out", trial))
    assert [event.details["attacks"] for event in result.events if event.name == "attack"] == [["sign-flip"]]
    assert report_page.page_of(study).facts["Attack"] == "sign-flip"


def test_another_cluster_is_another_study(run: Callable[..., Study], tmp_path: Path) -> None:
    run(strategies=["all-reduce"])
    (tmp_path / "slow.toml").write_text(CLUSTER.replace("50.0", "25.0"))
    with pytest.raises(UsageError, match=r"the simulated cluster was .*slow\.toml, now .* with other settings"):
        run(strategies=["all-reduce"])
    with pytest.raises(UsageError, match=r"the simulated cluster was .*slow\.toml, now lab-1gbe; give another --out"):
        run(strategies=["all-reduce"], cluster="lab-1gbe")
    with pytest.raises(UsageError, match="engine was virtual, now ray"):
        run(strategies=["all-reduce"], engine="ray", cluster=None)


def test_what_has_no_room_is_left_out_and_a_failure_is_one_trials(run: Callable[..., Study], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + "\nif worker.size == 2:\n    raise ValueError('on purpose')\n")
    study = run(strategies=["ps-asp"], workers=[2, 3, 4])
    assert [(out.variant.text, out.workers) for out in study.spec.left_out] == [("ps-asp", 4)]
    assert study.frames.trials["status"].tolist() == ["failed", "finished"]
    assert "on purpose" in study.frames.trials["reason"][0]


def test_its_report_says_on_which_cluster(run: Callable[..., Study], tmp_path: Path) -> None:
    study = run(target="count=2", strategies=["all-reduce"], max_time_s=9000.0)
    page = report_page.page_of(study)
    assert page.facts["Budget"] == "9000 virtual s"
    assert "slow.toml" in page.facts["Cluster"]
    assert f"--engine virtual --cluster {tmp_path / 'slow.toml'}" in page.command
    html = report_page.render([page])
    assert "Simulated cluster slow. Gradients are real" in html
    assert html.split('<section id="summary"')[0].count("imulated cluster slow") == 1  # once is enough
    assert study.verdict.said[-1] == "Times are virtual, those of the simulated cluster slow."
    assert study.verdict.lines[0].startswith("No winner at count 2; runs are too few")


@pytest.mark.parametrize("is_seen", [False, True])
def test_somebody_who_looks_sees_how_it_goes(
    run: Callable[..., Study], is_seen: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it goes to a file, that has what the scripts print and nothing else."""
    stream = io.StringIO()
    terminal = Console(file=stream, width=200, force_terminal=is_seen)
    monkeypatch.setattr("paceline.lab.study.Console", lambda stderr: terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run(strategies=["all-reduce"])
    shown = stream.getvalue()
    assert capsys.readouterr().out == ""
    if is_seen:
        assert "1/2 all-reduce x 1 seed 0: count 3\n" in shown
        assert "2/2 all-reduce x 2 seed 0: count 3\n" in shown  # judged as often: every four batches
    else:
        assert shown == ""


@final
@dataclass(frozen=True, kw_only=True)
class _OfAUser(Strategy):
    """Of a class outside the package: all-reduce, whose iterations it calls rounds."""

    summary: ClassVar[str] = "what a user wrote"

    pace: int = option(1, "has no effect")

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=True, unit="round", tells_stop=True, traffic=(AllReduced(),))

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return AllReduce().bind(context, replica)


def test_a_strategy_that_a_user_registered_is_compared_and_reported(
    run: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(STRATEGIES, dict)
    monkeypatch.setitem(STRATEGIES, "mine", Entry(name="mine", strategy=_OfAUser, summary="what a user wrote"))
    study = run(strategies=["all-reduce", "mine:pace=2"])
    trials = study.frames.trials
    assert set(trials["status"]) == {"finished"}
    assert dict(zip(trials["strategy"], trials["unit"], strict=True)) == {
        "all-reduce": "update",
        "mine:pace=2": "round",
    }
    again = Study.open(tmp_path / "out")
    assert "mine:pace=2" in set(again.frames.summary["strategy"])
    report_page.write([again.directory], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "mine:pace=2" in page
    assert "Iterations (rounds)" in page
    first = Result(runner.directory_of(study.directory, study.spec.trials[-1]))
    assert (first.manifest["strategy"]["name"], first.unit) == ("mine", "round")


def test_a_report_says_what_failures_took_of_each_strategy(run: Callable[..., Study], tmp_path: Path) -> None:
    """Those that can go on without some workers do; the one that cannot begins anew from checkpoints."""
    failing = CLUSTER.replace(
        "[compute]", "back_after_s = 100.0\nprice_per_hour = 36.0\n[compute]\nfailures_per_hour = 10.0"
    )
    (tmp_path / "slow.toml").write_text(failing)
    asked = {"elastic": "1:4", "replace": 20, "checkpoint_every": 1, "eval_every": None}
    study = run(strategies=["all-reduce", "all-reduce:aggregate=fools-gold"], workers=[3], **asked)
    assert list(study.frames.trials["status"]) == ["finished", "finished"]
    found = losses.of_trials(study.directory, study.frames)
    rows = losses.table(study.frames, found)["rows"]
    for goodput, row in zip(found.values(), rows, strict=True):
        parts = goodput.regrouping + goodput.steps + goodput.starting
        assert 0 < parts < 1
        assert goodput.goodput == pytest.approx(1 - parts)
        assert row[1:3] == ["3", f"{round(goodput.goodput * 100)} %"]
    assert [row[0] for row in rows] == ["all-reduce", "all-reduce:aggregate=fools-gold"]
    elastic, anew = found.values()
    assert anew.regrouping == 0 < elastic.regrouping
    page = report_page.render([report_page.page_of(study)])
    assert "What failures took" in page
    assert "1:4 workers, and 20 workers in the place of others" in page
    assert "--elastic 1:4 --replace 20 --checkpoint-every 1" in page
    with pytest.raises(UsageError, match="--replace has no effect without --elastic"):
        run(replace=2, out=tmp_path / "other")
