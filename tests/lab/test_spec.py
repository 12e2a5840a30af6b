"""What a study is asked for: checked before anything starts, and the same after a way through JSON."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.lab.spec import StudySpec, parse_seeds
from paceline.lab.variant import Variant
from paceline.lab.virtual_cluster import VirtualCluster
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Strategy
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.single import Single
from tests.lab.made import spec

SCRIPT = "import paceline\n\n@worker.evaluation\ndef f(model):\n    return {'accuracy': 1.0}\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def create(script: Path, **settings: Any) -> StudySpec:
    return StudySpec.create(
        script, **{"strategies": ["all-reduce"], "workers": [1, 2], "seeds": [0], "target": "accuracy=0.9", **settings}
    )


def test_trials_are_a_seed_after_the_other() -> None:
    chosen = spec(strategies=("single", "ps-bsp:servers=2"), workers=(1, 2), seeds=(4, 5))
    assert [trial.id for trial in chosen.trials] == [
        f"{name}-s{seed}" for seed in (4, 5) for name in ("single-n1", "ps-bsp_servers=2-n1", "ps-bsp_servers=2-n2")
    ]
    assert [(out.variant.text, out.workers) for out in chosen.left_out] == [("single", 2)]
    assert "runs on 1 worker, not 2" in chosen.left_out[0].reason


def test_elastic_runs_that_may_come_to_have_nobody_honest_are_left_out() -> None:
    given = {"strategies": ("all-reduce", "fed-avg"), "workers": (3,), "attacks": ("gauss",)}
    chosen = spec(**given, elastic="1:3")
    (out,) = chosen.left_out
    assert out.variant.text == "all-reduce"
    assert "may come to have 1 workers, for which it is refused: --attack gauss leaves none" in out.reason
    assert spec(**given, elastic="2:3").left_out == ()


def test_under_attack_what_cannot_be_hostile_is_left_out() -> None:
    chosen = spec(strategies=("single", "all-reduce", "fed-avg"), workers=(1, 3), seeds=(0,), attacks=("alie",))
    assert [trial.id for trial in chosen.trials] == ["all-reduce-n3-s0", "fed-avg-n1-s0", "fed-avg-n3-s0"]
    reasons = {(out.variant.text, out.workers): out.reason for out in chosen.left_out}
    assert "leaves none of 1 worker(s) honest" in reasons["all-reduce", 1]
    assert "has no effect under this strategy" in reasons["single", 1]
    assert chosen.config(0).attacks == ("alie",)
    assert StudySpec.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
    assert chosen.command(out="there")[-2:] == ["--attack", "alie"]
    with pytest.raises(UsageError, match="attacks was"):
        replace(chosen, attacks=()).require_same_study(chosen)
    with pytest.raises(UsageError, match="unknown attack 'aly'"):
        spec(attacks=("aly",))


def test_a_strategy_with_options() -> None:
    variant = Variant.parse("ps-bsp:servers=3:backup_workers=1")
    assert variant.text == "ps-bsp:servers=3:backup_workers=1"
    assert variant.strategy.traits.num_servers == 3
    assert variant.strategy.traits.is_synchronous, "a clock is one update, though it does not wait for everybody"
    assert not Variant.parse("ps-ssp").strategy.traits.is_synchronous
    assert Variant.parse("ring").strategy.traits.is_synchronous


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Single(), "single"),
        (ParameterServer(servers=2), "ps-bsp:servers=2"),
        (ParameterServer(consistency="asp", torn_reads=True), "ps-asp:torn_reads=true"),
        (ParameterServer(consistency="ssp", staleness=0, nonfinite="skip"), "ps-ssp:nonfinite=skip:staleness=0"),
        (AllReduce(algorithm="ring", bucket_mb=2.5), "ring:bucket_mb=2.5"),
        (AllReduce(algorithm="tree"), "all-reduce:algorithm=tree"),
    ],
)
def test_a_strategy_that_is_an_object(strategy: Strategy, text: str) -> None:
    variant = Variant.of(strategy)
    assert (variant.text, variant.strategy) == (text, strategy)
    assert Variant.of(text) == variant


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategies": ["all-reduc"]}, "unknown strategy 'all-reduc'; did you mean 'all-reduce'?"),
        ({"strategies": ["ps-bsp:server=2"]}, "unknown option for ps-bsp 'server'; did you mean 'servers'?"),
        ({"strategies": ["ps-bsp:servers"]}, "strategy 'ps-bsp:servers': 'servers' is not of the form option=value"),
        (
            {"strategies": ["ps-bsp:servers=1:servers=2"]},
            "strategy 'ps-bsp:servers=1:servers=2': servers is given twice",
        ),
        ({"strategies": ["ps-bsp", "ps-bsp"]}, "strategies: ps-bsp is given twice"),
        ({"strategies": []}, "strategies: give at least one"),
        ({"strategies": ["single"], "workers": [2, 3]}, "strategy single runs on 1 worker, not 2"),
        ({"workers": [0, 1]}, "workers must be at least 1, not 0"),
        ({"workers": [2, 2]}, "workers: 2 is given twice"),
        ({"seeds": []}, "seeds: give at least one"),
        ({"seeds": [-1]}, "seed must be in"),
        ({"target": "accuracy"}, "target 'accuracy' is not of the form metric=value"),
        ({"target": "acuracy=0.9"}, "unknown target metric 'acuracy'; did you mean 'accuracy'?"),
        ({"deadline_s": 0.0}, "deadline must be positive, not 0"),
        ({"max_steps": 0}, "max-steps must be positive, not 0"),
        ({"device": "gpu"}, "device must be auto, cpu or cuda, not 'gpu'"),
        ({"engine": "rya"}, "unknown engine 'rya'; did you mean 'ray'?"),
        ({"engine": "virtual"}, "--engine virtual needs --cluster: a TOML file, or one of commodity-10gbe"),
        ({"cluster": "lab-1gbe"}, "a cluster's file has no effect on real machines; add --engine virtual"),
        ({"engine": "virtual", "cluster": "lab-1gb"}, "cannot read the cluster lab-1gb: "),
        (
            {"engine": "virtual", "cluster": "lab-1gbe", "address": "a:1"},
            "--address has no effect with --engine virtual",
        ),
        ({"engine": "virtual", "cluster": "lab-1gbe", "workers": [1000]}, "has room for 32 worker(s), not 1000"),
    ],
)
def test_refused_before_anything_starts(script: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        create(script, **settings)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"strategies": "all-reduce"},
            "strategies are given as a list, such as ['all-reduce', 'ps-bsp'], not as 'all-",
        ),
        ({"strategies": [3]}, "a strategy is a name or a Strategy, not 3"),
        ({"workers": 1}, "workers are given as a list, such as [1, 2], not as 1"),
        ({"workers": [1.5]}, "workers are whole numbers, not 1.5"),
        ({"seeds": "3"}, "seeds are given as a list"),
    ],
)
def test_things_of_another_kind(script: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        create(script, **settings)
    assert said in str(refused.value)


def test_a_function_is_no_script() -> None:
    with pytest.raises(UsageError, match="a study takes the path of a script"):
        create(test_a_function_is_no_script)  # type: ignore[arg-type]


def test_a_study_does_not_run_another_script(script: Path) -> None:
    chosen = create(script)
    assert chosen.read_script().source == SCRIPT
    script.write_text(SCRIPT + "\n")
    with pytest.raises(UsageError, match="has changed since this study was made"):
        chosen.read_script()


def test_scripts_that_cannot_be_read(script: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean 'train\.py'"):
        create(script.with_name("trian.py"))
    script.write_text("for x in\n")
    with pytest.raises(UsageError, match="not valid Python"):
        create(script)


VARIANTS = st.sampled_from(["single", "all-reduce", "ring", "ps-bsp", "ps-bsp:servers=2", "ps-ssp:staleness=4"])
COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(tuple)


@given(
    strategies=st.lists(VARIANTS, min_size=1, unique=True).map(tuple),
    workers=COUNTS.map(lambda counts: tuple(dict.fromkeys((1, *counts)))),
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(tuple),
    max_time_s=st.none() | st.floats(0.1, 1e6),
    eval_every=st.none() | st.integers(1, 1000),
    deadline_s=st.sampled_from([300.0, 60.0]),
    environment=st.lists(st.sampled_from(["HOME", "A=1", "B=x y=z"]), unique=True).map(tuple),
)
def test_json_and_the_command_line_say_it_all(**settings: Any) -> None:
    chosen = spec(**settings)
    assert StudySpec.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
    command = chosen.command(out="o u t")
    assert shlex.split(shlex.join(command)) == command
    assert parse_seeds(command[command.index("--seeds") + 1]) == chosen.seeds
    assert tuple(command[at + 1] for at, part in enumerate(command) if part == "--env") == chosen.environment
    assert ("--deadline" in command) == (chosen.deadline_s != RunConfig.deadline_s)
    assert len({trial.id for trial in chosen.trials}) == len(chosen.trials)


def test_variables_of_workers_are_set_here_or_given_and_change_a_study(script: Path) -> None:
    with pytest.raises(UsageError, match="NOWHERE_SET: it is not set here"):
        create(script, environment=("NOWHERE_SET",))
    with pytest.raises(UsageError, match="for processes that are started"):
        create(script, environment=("A=1",), engine="virtual", cluster="lab-1gbe")
    with pytest.raises(UsageError, match="environment are given as a list"):
        create(script, environment="HOME")
    assert create(script, environment={"HOME": "a", "B": "x=y"}).environment == ("HOME=a", "B=x=y")
    assert create(script, environment=iter(["HOME"])).environment == ("HOME",)
    with pytest.raises(UsageError, match="environment"):
        create(script, environment=("A=1",)).require_same_study(create(script, environment=("A=2",)))


def test_what_is_no_spec() -> None:
    for plain in ({}, {**spec().to_json(), "more": 1}, {**spec().to_json(), "workers": None}):
        with pytest.raises(UsageError, match="not a study of this version"):
            StudySpec.from_json(plain)


def test_more_of_the_same_is_an_extension_and_all_else_is_named() -> None:
    earlier = spec(strategies=("all-reduce", "ps-bsp"), workers=(1, 2), seeds=(0, 1))
    spec(strategies=("ps-asp", "ps-bsp", "all-reduce"), workers=(1, 2, 4), seeds=(0, 1, 2)).require_same_study(earlier)
    earlier.require_same_study(earlier)
    spec(strategies=("ps-bsp",), workers=(2,), seeds=(0,)).require_same_study(earlier)
    elsewhere = {"address": "elsewhere:6379", "deadline_s": 60.0}
    spec(strategies=("all-reduce", "ps-bsp"), seeds=(0, 1), **elsewhere).require_same_study(earlier)
    with pytest.raises(UsageError) as refused:
        spec(strategies=("all-reduce", "ring"), workers=(1, 2), seeds=(0, 1), target="accuracy=0.6", max_steps=5)\
            .require_same_study(earlier)  # fmt: skip
    assert str(refused.value) == (
        "strategies had ps-bsp as well; target was accuracy=0.5, now accuracy=0.6; max_steps was not given, now 5"
    )


def test_a_changed_script_makes_another_study(script: Path) -> None:
    earlier = create(script)
    script.write_text(SCRIPT + "\nlr = 0.2\n")
    with pytest.raises(UsageError, match="the script's text has changed"):
        create(script).require_same_study(earlier)


CLUSTER = """
[[hosts]]
count = 3
bandwidth_gbit_per_s = 1.0
[compute]
step_s = 0.1
"""


def test_a_simulated_cluster_is_kept_as_a_whole(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may go, move, or say something else about itself; another cluster makes another study."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    file = tmp_path / "mine.toml"

    def virtual(text: str) -> StudySpec:
        file.write_text(text)
        return create(script, engine="virtual", cluster=file, strategies=["all-reduce", "ps-asp"], workers=[1, 3])

    first = virtual(CLUSTER)
    assert first.address is None, "a simulated study is on no Ray cluster"
    assert [(out.variant.text, out.workers) for out in first.left_out] == [("ps-asp", 3)]
    assert "1 server(s) need hosts of their own" in first.left_out[0].reason
    file.unlink()
    kept = StudySpec.from_json(json.loads(json.dumps(first.to_json())))
    assert kept == first
    assert kept.cluster is not None
    assert (kept.cluster.name, kept.cluster.text) == ("mine", CLUSTER)
    command = kept.command(out="out")
    assert command[command.index("--cluster") + 1] == str(file)
    virtual(f'about = "ours"\n{CLUSTER}# in the cellar\n').require_same_study(kept)
    with pytest.raises(UsageError) as refused:
        virtual(CLUSTER.replace("1.0", "10.0")).require_same_study(kept)
    assert str(refused.value) == f"the simulated cluster was {file}, now {file} with other settings"
    with pytest.raises(UsageError, match=r"the simulated cluster was \S+mine.toml, now lab-1gbe"):
        replace(first, cluster=VirtualCluster.read("lab-1gbe")).require_same_study(kept)
    with pytest.raises(UsageError, match=r"engine was virtual, now ray; cluster was \S+mine.toml, now not given"):
        replace(first, cluster=None, engine="ray").require_same_study(kept)


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("3,7", (3, 7)), ("3,", (3,)), ("1", (0,))])
def test_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


def test_seeds_that_are_none() -> None:
    with pytest.raises(UsageError, match="give how many, as 3, or which"):
        parse_seeds("few")
