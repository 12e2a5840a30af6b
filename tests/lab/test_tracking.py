"""What trackers are told of a run: sums per second of the training clock, evaluations, and how it ended."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.engines.standing import Progress
from paceline.errors import RunFailed, UsageError
from paceline.lab import trackers, tracking
from paceline.lab.trackers import MAX_WAITING, Delivery, Tracker
from paceline.lab.tracking import Feed, Tracking
from paceline.records import EvaluationRecord, EventRecord, MetricRecord, Record, StepRecord

SETTINGS = {"strategy": "ps-asp", "workers": 2, "seed": 0}


class Notebook(Tracker):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, float, dict[str, float]]] = []
        self.ends: list[bool] = []

    def log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        self.logged.append((step, time_s, dict(values)))

    def close(self, *, is_finished: bool) -> None:
        self.ends.append(is_finished)


class Onlooker:
    """A watcher that counts."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_progress(self, progress: Progress) -> None:
        self.seen.append("progress")

    def on_output(self, who: str, line: str) -> None:
        self.seen.append(line)

    def on_records(self, records: Sequence[Record]) -> None:
        self.seen.append(f"{len(records)} records")


def step(worker: int, iteration: int, ends_s: float, *, staleness: int = 0) -> StepRecord:
    return StepRecord(worker, iteration, iteration, ends_s, 50, 0.15, 0.05, 0.05, 1000, staleness, 0.0)


def four_steps_a_second(num_seconds: int) -> list[Record]:
    """Two workers, 100 samples each iteration, a quarter of a second each; staleness 0 and 2."""
    return [
        step(worker, iteration, iteration * 0.25 - 0.01, staleness=2 * worker)
        for iteration in range(1, 4 * num_seconds + 1)
        for worker in (0, 1)
    ]


def test_a_second_is_told_as_means_and_rates() -> None:
    notebook = Notebook()
    feed = Feed([notebook])
    feed.take([*four_steps_a_second(3), *[MetricRecord(w, 1, 1, 0.2, "loss", 1.0 + w) for w in (0, 1)]])
    feed.close(is_finished=True)
    iteration, time_s, values = notebook.logged[0]
    assert (iteration, time_s) == (4, pytest.approx(0.99))
    assert values == pytest.approx(
        {
            "train/loss": 1.5,
            "pace/samples_per_s": 400.0,
            "time/compute": 0.6,
            "time/communication": 0.2,
            "time/waiting": 0.2,
            "staleness/mean": 1.0,
            "staleness/max": 2,
        }
    )
    assert [entry[0] for entry in notebook.logged] == [4, 8, 12]
    # The last second ended with its last step.
    assert notebook.logged[-1][2]["pace/samples_per_s"] == pytest.approx(400 / 0.99)


def test_it_makes_no_difference_how_records_are_cut_into_messages() -> None:
    records = four_steps_a_second(5)
    whole, single = Notebook(), Notebook()
    for notebook, messages in ((whole, [records]), (single, [[record] for record in records])):
        feed = Feed([notebook])
        for message in messages:
            feed.take(message)
        feed.close(is_finished=True)
    assert whole.logged == single.logged


def test_a_worker_that_sends_late_still_counts_in_its_second() -> None:
    notebook = Notebook()
    feed = Feed([notebook])
    early, late = ([record for record in four_steps_a_second(3) if record.worker == w] for w in (0, 1))
    feed.take(early[:7])  # into the second second
    feed.take(late)
    feed.take(early[7:])
    feed.close(is_finished=True)
    assert [values["pace/samples_per_s"] for _, _, values in notebook.logged[:2]] == [400.0, 400.0]


def test_no_record_is_lost_however_late() -> None:
    notebook = Notebook()
    feed = Feed([notebook])
    feed.take([step(0, 1, 9.5)])
    feed.take([step(0, 2, 12.5)])
    feed.take([step(1, 1, 0.5)])
    feed.close(is_finished=True)
    samples = [values["pace/samples_per_s"] for _, _, values in notebook.logged if "pace/samples_per_s" in values]
    assert len(notebook.logged) == 3
    assert samples[:2] == [50.0, 50.0]


def test_a_resumed_run_is_paced_from_where_it_began() -> None:
    notebook = Notebook()
    feed = Feed([notebook])
    feed.take(
        [EventRecord("training", "run", 40, 10.5, {}), step(0, 41, 10.75), step(0, 42, 11.0 - 1e-9), step(0, 43, 13.5)]
    )
    feed.close(is_finished=True)
    assert notebook.logged[0][2]["pace/samples_per_s"] == pytest.approx(200.0)


def test_evaluations_are_told_at_once() -> None:
    notebook = Notebook()
    Feed([notebook]).take([EvaluationRecord(20, 0.5, 1000, {"accuracy": 0.4, "loss": 2.0}, 0.1)])
    assert notebook.logged == [(20, 0.5, {"evaluation/accuracy": 0.4, "evaluation/loss": 2.0})]


@pytest.mark.parametrize(
    ("name", "without_error", "is_finished"),
    [("checkpoint", True, True), ("checkpoint", False, False), ("failed", True, False), ("interrupted", True, False)],
)
def test_trackers_hear_how_the_run_ended(name: str, without_error: bool, is_finished: bool) -> None:
    notebook = Notebook()
    feed = Feed([notebook])
    feed.take([EventRecord(name, "run", 1, 0.1, {})])
    feed.close(is_finished=without_error)
    assert notebook.ends == [is_finished]


def test_a_script_may_log_what_has_no_mean() -> None:
    notebook = Notebook()
    feed = Feed([notebook])
    feed.take([MetricRecord(0, 1, 1, 0.2, "loss", value) for value in (math.inf, -math.inf)])
    feed.take([MetricRecord(0, 1, 1, 0.2, "large", 1.7e308) for _ in range(2)])
    feed.close(is_finished=True)
    assert math.isnan(notebook.logged[0][2]["train/loss"])
    assert notebook.logged[0][2]["train/large"] == math.inf


# --- services that fail --------------------------------------------------------------------------------------------


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tracking]:
    """Has the trackers made by these functions under their names, and follows with all of them."""

    def offer(**makers: Callable[[], Tracker]) -> Tracking:
        offers = {name: lambda run, settings, make=make: make() for name, make in makers.items()}
        monkeypatch.setattr(tracking, "SERVICES", offers)
        monkeypatch.setattr(tracking, "load", lambda package: None)
        return Tracking(services=tuple(makers))

    return offer


@pytest.mark.parametrize("step", ["open", "log", "close"])
def test_a_tracker_that_fails_is_given_up_and_the_others_go_on(
    step: str, offered: Callable[..., Tracking], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook()

    class Broken(Tracker):
        def __init__(self) -> None:
            self._may("open")

        def log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
            self._may("log")

        def close(self, *, is_finished: bool) -> None:
            self._may("close")

        def _may(self, do: str) -> None:
            if do == step:
                raise ConnectionError("no route to host")

    follow(offered(broken=Broken, notebook=lambda: notebook), four_steps_a_second(4))
    assert len(notebook.logged) == 4
    assert notebook.ends == [True]
    said = capsys.readouterr().err
    assert said == "broken failed, and it is told no more: ConnectionError: no route to host\n"


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """What a service that does not answer waits for, until the test is over."""
    until = threading.Event()
    yield until
    until.set()


def test_a_service_that_does_not_answer_holds_up_nobody(
    stuck: threading.Event,
    offered: Callable[..., Tracking],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when it is opened, not while the run goes on, and at its end no longer than it is given."""
    monkeypatch.setattr(trackers, "PATIENCE_S", 0.1)

    def opened() -> Tracker:
        stuck.wait(60)
        return Notebook()

    began_s = time.monotonic()
    tracking = offered(mlflow=opened)
    follow(tracking, four_steps_a_second(4))
    assert time.monotonic() - began_s < 30  # of the 60 s after which the service would answer
    said = "mlflow has not taken everything 0.1 s after the run's end: the rest may be lost, and it is told no more\n"
    assert capsys.readouterr().err == said


def test_who_failed_is_told_of_no_later_run_and_that_is_said_once(
    offered: Callable[..., Tracking], capsys: pytest.CaptureFixture[str]
) -> None:
    """A study has many trials, and a service that hangs would cost each of them its patience."""
    opened: list[str] = []
    notebook = Notebook()

    def broken() -> Tracker:
        opened.append("broken")
        raise ConnectionError("no route to host")

    tracking = offered(broken=broken, notebook=lambda: notebook)
    for _ in range(3):
        follow(tracking, four_steps_a_second(2))
    assert opened == ["broken"]
    assert notebook.ends == [True] * 3
    assert capsys.readouterr().err.count("told no more") == 1


def test_a_service_that_is_asked_for_twice_is_told_once(offered: Callable[..., Tracking]) -> None:
    notebooks: list[Notebook] = []

    def opened() -> Tracker:
        notebooks.append(Notebook())
        return notebooks[-1]

    follow(replace(offered(mlflow=opened), services=("mlflow", "mlflow")), four_steps_a_second(2))
    assert [notebook.ends for notebook in notebooks] == [[True]]


def test_what_a_slow_service_does_not_take_is_left_out_and_said(
    stuck: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook()

    def opened() -> Tracker:
        stuck.wait(60)
        return notebook

    slow = Delivery("wandb", opened)
    for step in range(MAX_WAITING + 7):
        slow.log({"loss": 1.0}, step=step, time_s=0.0)
    stuck.set()
    slow.close(is_finished=True)
    assert [step for step, _, _ in notebook.logged] == list(range(MAX_WAITING))
    assert notebook.ends == [True]
    assert capsys.readouterr().err == "wandb is too slow: 7 messages of this run were left out\n"


def test_a_run_that_raises_has_not_finished(offered: Callable[..., Tracking]) -> None:
    """As where the cluster was not to be had, of which there is no record."""
    notebook = Notebook()
    with (
        pytest.raises(RunFailed, match="no cluster"),
        offered(notebook=lambda: notebook).follow(Onlooker(), run="run", settings=SETTINGS),
    ):
        raise RunFailed("no cluster")
    assert notebook.ends == [False]


def test_the_watcher_still_sees_everything(tmp_path: Path) -> None:
    onlooker = Onlooker()
    with Tracking(tensorboard=tmp_path).follow(onlooker, run="run", settings=SETTINGS) as watcher:
        watcher.on_progress(Progress())
        watcher.on_output("worker-0", "hello")
        watcher.on_records(four_steps_a_second(1))
    assert onlooker.seen == ["progress", "hello", "8 records"]
    with Tracking().follow(onlooker, run="run", settings=SETTINGS) as watcher:
        assert watcher is onlooker


# --- the services --------------------------------------------------------------------------------------------------


def follow(tracking: Tracking, records: Sequence[Record]) -> None:
    with tracking.follow(Onlooker(), run="ps-asp-n2-s0", settings=SETTINGS) as watcher:
        watcher.on_records(records)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    evaluation = EvaluationRecord(8, 1.99, 800, {"accuracy": 0.25}, 0.1)
    follow(Tracking(tensorboard=tmp_path), [*four_steps_a_second(2), evaluation])
    events = EventAccumulator(str(tmp_path / "ps-asp-n2-s0"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "pace/samples_per_s", "time/compute", "time/communication", "time/waiting", "staleness/mean", "staleness/max",
        "evaluation/accuracy",
    }  # fmt: skip
    (accuracy,) = events.Scalars("evaluation/accuracy")
    assert (accuracy.step, accuracy.value) == (8, 0.25)
    pace = events.Scalars("pace/samples_per_s")
    assert [(one.step, one.value) for one in pace] == [(4, pytest.approx(400.0)), (8, pytest.approx(400 / 0.99))]
    assert pace[1].wall_time - pace[0].wall_time == pytest.approx(1.0, abs=1e-3)


def test_nobodys_events_are_deleted_or_mixed_with_others(tmp_path: Path) -> None:
    """A trial of the same name may be another study's, or an earlier attempt that broke off."""
    for accuracy in (0.25, 0.5, 0.75):
        follow(Tracking(tensorboard=tmp_path), [EvaluationRecord(8, 1.99, 800, {"accuracy": accuracy}, 0.1)])
    found = {}
    for place in tmp_path.iterdir():
        events = EventAccumulator(str(place)).Reload()
        found[place.name] = [one.value for one in events.Scalars("evaluation/accuracy")]
    assert found == {"ps-asp-n2-s0": [0.25], "ps-asp-n2-s0-2": [0.5], "ps-asp-n2-s0-3": [0.75]}


def test_mlflow_gets_parameters_metrics_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Client:
        def create_run(self, experiment_id: str, *, run_name: str) -> Any:
            calls.append(("create", experiment_id, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def log_batch(self, run_id: str, *, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
            calls.append(("params", run_id, dict(params)) if params else ("metrics", run_id, metrics))

        def set_terminated(self, run_id: str, *, status: str) -> None:
            calls.append(("end", run_id, status))

    experiment = SimpleNamespace(experiment_id="7")
    fake = SimpleNamespace(
        MlflowClient=Client, set_experiment=lambda name: calls.append(("experiment", name)) or experiment
    )
    entities = SimpleNamespace(Param=lambda key, value: (key, value), Metric=lambda *fields: fields)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(trackers, "time", SimpleNamespace(time=lambda: 1.7e9))
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    evaluations = [EvaluationRecord(8, 1.5, 800, {"accuracy": 0.25, "loss": float("nan")}, 0.1)]
    follow(Tracking(services=("mlflow",)), [*evaluations, EventRecord("failed", "run", 8, 1.5, {})])
    assert calls == [
        ("experiment", "paceline"),
        ("create", "7", "ps-asp-n2-s0"),
        ("params", "r1", {"strategy": "ps-asp", "workers": "2", "seed": "0"}),
        ("metrics", "r1", [("evaluation/accuracy", 0.25, 17 * 10**11, 8), ("training_time_s", 1.5, 17 * 10**11, 8)]),
        ("end", "r1", "FAILED"),
    ]


def test_wandb_is_told_iterations_as_the_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Run:
        def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
            calls.append(("axis", name, step_metric))

        def log(self, values: Mapping[str, float]) -> None:
            calls.append(("log", dict(values)))

        def finish(self, *, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    def init(**settings: Any) -> Run:
        calls.append(("init", settings["project"], settings["name"], settings["config"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    follow(Tracking(services=("wandb",)), [EvaluationRecord(8, 1.5, 800, {"accuracy": 0.25}, 0.1)])
    assert calls == [
        ("init", "paceline", "ps-asp-n2-s0", SETTINGS),
        ("axis", "iteration", None),
        ("axis", "*", "iteration"),
        ("log", {"evaluation/accuracy": 0.25, "iteration": 8, "training_time_s": 1.5}),
        ("finish", 0),
    ]


@pytest.mark.parametrize("package", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_said_before_anything_starts(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    asked = partial(Tracking, **({"tensorboard": tmp_path} if package == "tensorboard" else {"services": (package,)}))
    with pytest.raises(UsageError, match=rf"cannot import {package} .*pip install 'paceline\[{package}\]'"):
        asked()


def test_an_unknown_service_is_refused() -> None:
    with pytest.raises(UsageError, match="mlflow"):
        Tracking(services=("mlfow",))
