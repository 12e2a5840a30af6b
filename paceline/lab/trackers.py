"""Where a run's numbers can go while it trains: TensorBoard, MLflow, Weights & Biases; no service keeps it waiting."""

import importlib
import itertools
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import final

from paceline.errors import UsageError

MAX_WAITING = 1000  # about a quarter of an hour of a run that is evaluated now and then
PATIENCE_S = 20.0
_NO_MORE = ", and it is told no more"

Settings = Mapping[str, str | int | float]


class Tracker(ABC):
    """One run at one service; to make one raises a UsageError where the service's package is not installed."""

    @abstractmethod
    def log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        """Keep numbers by name, finite or not, of this global iteration and time on the training clock."""

    @abstractmethod
    def close(self, *, is_finished: bool) -> None:
        """The run has ended; well, or not."""


@final
class TensorBoard(Tracker):
    """Event files for `tensorboard --logdir`. Its relative time is the training clock.

    A directory that holds another run's events is left as it is; the same name with a number takes its place.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        load("tensorboard")
        writers = importlib.import_module("torch.utils.tensorboard")
        self._writer = writers.SummaryWriter(log_dir=str(_unused(directory)))
        self._began_s = time.time()  # noqa: TID251 - TensorBoard's
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step, walltime=self._began_s + time_s)
        self._writer.flush()

    def close(self, *, is_finished: bool) -> None:
        self._writer.close()


@final
class MLflow(Tracker):
    """A run at the server of MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME, else `paceline`."""

    def __init__(self, run: str, settings: Settings) -> None:
        mlflow = load("mlflow")
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline"))
        self._client = mlflow.MlflowClient()
        self._run_id = self._client.create_run(experiment.experiment_id, run_name=run).info.run_id
        self._entities = importlib.import_module("mlflow.entities")
        parameters = [self._entities.Param(name, str(value)) for name, value in settings.items()]
        self._client.log_batch(self._run_id, params=parameters)

    def log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        now_ms = int(time.time() * 1000)  # noqa: TID251 - MLflow's
        metrics = [
            self._entities.Metric(name, value, now_ms, step)
            for name, value in {**values, "training_time_s": time_s}.items()
            if math.isfinite(value)  # databases behind MLflow refuse others
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, *, is_finished: bool) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if is_finished else "FAILED")


@final
class WandB(Tracker):
    """A run at Weights & Biases, in the project of WANDB_PROJECT, else `paceline`."""

    def __init__(self, run: str, settings: Settings) -> None:
        wandb = load("wandb")
        project = os.environ.get("WANDB_PROJECT", "paceline")
        self._run = wandb.init(project=project, name=run, config=dict(settings), reinit="create_new")
        # Its own step only ever rises, while evaluations of an asynchronous run may come after later steps.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        self._run.log({**values, "iteration": step, "training_time_s": time_s})

    def close(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


@final
class Delivery(Tracker):
    """Hands on what it is told in a thread of its own, in order, as fast as the tracker takes it.

    The tracker is opened, told and closed by one thread. If it raises, or has not taken everything some time after the
    run's end, it is given up with a word on standard error. What comes while `MAX_WAITING` messages wait is left out,
    and so said at the end.
    """

    def __init__(self, name: str, opened: Callable[[], Tracker]) -> None:
        self._name = name
        self._actions: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._num_left_out = 0
        self.is_given_up = False
        """Whether its service is not worth being told of another run."""
        # A daemon: a service that hangs does not keep the program from ending.
        self._thread = threading.Thread(target=self._deliver, args=(opened,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        """Returns at once."""
        if not self._thread.is_alive():
            return
        if self._actions.qsize() >= MAX_WAITING:
            self._num_left_out += 1
            return
        self._actions.put(lambda tracker: tracker.log(values, step=step, time_s=time_s))

    def close(self, *, is_finished: bool) -> None:
        """Returns when everything is told, or after `PATIENCE_S`."""
        self._actions.put(lambda tracker: tracker.close(is_finished=is_finished))
        self._actions.put(None)
        self._thread.join(PATIENCE_S)
        if self._num_left_out:
            self._say(f"is too slow: {self._num_left_out} messages of this run were left out")
        if self._thread.is_alive():
            self.is_given_up = True
            self._say(f"has not taken everything {PATIENCE_S:g} s after the run's end: the rest may be lost{_NO_MORE}")

    def _deliver(self, opened: Callable[[], Tracker]) -> None:
        try:
            tracker = opened()
            while (action := self._actions.get()) is not None:
                action(tracker)
        except Exception as error:  # a service's client may raise anything, and none of it is worth a training run
            self.is_given_up = True
            self._say(f"failed{_NO_MORE}: {type(error).__name__}: {error}")

    def _say(self, what: str) -> None:
        print(f"{self._name} {what}", file=sys.stderr)


def _unused(directory: Path) -> Path:
    """The directory, or the first of `NAME-2`, `NAME-3`, ... where there are no events yet."""
    names = itertools.chain([directory.name], (f"{directory.name}-{number}" for number in itertools.count(2)))
    places = (directory.with_name(name) for name in names)
    return next(place for place in places if not any(place.glob("events.out.tfevents.*")))


def load(package: str) -> ModuleType:
    """A service's package. Raises UsageError, which says how to install it, if it is not there."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"cannot import {package} ({error}); install it with: pip install 'paceline[{package}]'"
        ) from None
