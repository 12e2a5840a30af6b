"""Every combination is judged with the script's options that suit it best, found by the same budget on another seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.scripting import Script
from paceline.errors import UsageError
from paceline.lab import report_page
from paceline.lab.spec import TUNING_SEED, StudySpec
from paceline.lab.study import Study
from paceline.running import launch
from paceline.strategies import name_of
from tests.lab.machine import Machine
from tests.lab.made import reaching, write_trial

BEST = {"all-reduce": "0.1", "ps-bsp": "0.01"}


class Bench:
    """A script that takes 10 s with the rate that suits the strategy, 30 s with 0.03, and never gets there else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, int, tuple[str, ...]]] = []
        self.fails: Callable[[str, str], bool] = lambda strategy, rate: False
        monkeypatch.setattr(launch, "run", self.run)

    def run(self, script: Script, *, strategy: Any, workers: int, seed: int, out: Path, **settings: Any) -> None:
        name = name_of(strategy)
        self.asked.append((name, seed, script.arguments))
        rate = dict(zip(script.arguments[::2], script.arguments[1::2], strict=True)).get("--lr", "1")
        if self.fails(name, rate):
            raise ArithmeticError("diverged")
        made = {BEST[name]: reaching(10.0), "0.03": reaching(30.0)}.get(rate, reaching(20.0, value=0.3))
        write_trial(out, made, workers=workers)
        (out / "trial.json").unlink()


@pytest.fixture
def bench(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


TUNE = {"tune": ("lr=0.01,0.03,0.1",), "workers": [2], "seeds": 2}


def test_each_is_judged_with_its_own_best(bench: Bench, run: Callable[..., Study]) -> None:
    study = run(**TUNE)
    tried = [(name, arguments) for name, seed, arguments in bench.asked if seed == TUNING_SEED]
    assert tried == [(name, ("--lr", rate)) for name in BEST for rate in ("0.01", "0.03", "0.1")]
    judged = [(name, seed, arguments) for name, seed, arguments in bench.asked if seed != TUNING_SEED]
    assert judged == [(name, seed, ("--lr", rate)) for seed in (0, 1) for name, rate in BEST.items()]
    trials = study.frames.trials
    assert trials["seed"].tolist() == [0, 0, 1, 1], "what was tuned with is not judged"
    assert trials["setting"].tolist() == [f"lr={BEST[name]}" for name in trials["strategy"]]
    page = report_page.page_of(study)
    assert page.facts["Tuned"] == "all-reduce × 2: lr=0.1; ps-bsp × 2: lr=0.01"
    assert "--tune lr=0.01,0.03,0.1" in page.command
    assert "tuned on a seed that is not judged" in report_page.render([page])


def test_without_tuning_the_report_says_so(bench: Bench, run: Callable[..., Study]) -> None:
    study = run(workers=[2], seeds=1, arguments=["--lr", "0.1"])
    assert "options were the same for all" in report_page.render([report_page.page_of(study)])


def test_an_interrupted_study_tunes_no_trial_twice(bench: Bench, run: Callable[..., Study]) -> None:
    bench.fails = lambda strategy, rate: strategy == "ps-bsp" and rate == "0.03"
    run(**TUNE)
    num = len(bench.asked)
    run(**{**TUNE, "seeds": 3})
    assert [seed for _, seed, _ in bench.asked[num:]] == [2, 2]


def test_where_none_gets_there_the_closest_is_taken_and_failures_are_not(
    bench: Bench, run: Callable[..., Study]
) -> None:
    bench.fails = lambda strategy, rate: rate == "3"
    study = run(**{**TUNE, "tune": ("lr=3,2,1",)})
    assert study.frames.trials["setting"].tolist() == ["lr=2"] * 4


def test_several_options_are_tried_in_all_combinations(bench: Bench, run: Callable[..., Study]) -> None:
    run(**{**TUNE, "tune": ("lr=0.01,0.1", "momentum=0,0.9"), "strategies": ["all-reduce"]})
    assert [arguments for _, seed, arguments in bench.asked if seed == TUNING_SEED] == [
        ("--lr", rate, "--momentum", momentum) for rate in ("0.01", "0.1") for momentum in ("0", "0.9")
    ]


@pytest.mark.parametrize("tune", ["lr", "=1", "lr=", "lr=a b"])
def test_what_is_no_choice_is_refused(tune: str, run: Callable[..., Study], machine: Machine) -> None:
    with pytest.raises(UsageError, match="values to try"):
        run(tune=(tune,))


def test_tuning_stays_in_the_study(bench: Bench, run: Callable[..., Study]) -> None:
    study = run(**TUNE)
    assert StudySpec.from_json(study.spec.to_json()) == study.spec
    assert Study.open(study.directory).spec.tune == ("lr=0.01,0.03,0.1",)
    with pytest.raises(UsageError, match="tune was"):
        run(**{**TUNE, "tune": ("lr=1,2",)})
