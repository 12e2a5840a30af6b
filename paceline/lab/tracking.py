"""Follows a run by its records as they arrive, and tells trackers what they add up to."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

from paceline.engines.standing import Progress, Watcher
from paceline.errors import unknown
from paceline.lab.trackers import Delivery, MLflow, Settings, TensorBoard, Tracker, WandB, load
from paceline.records import EvaluationRecord, EventRecord, MetricRecord, Record, StepRecord

_INTERVAL_S = 1.0
_UNHAPPY_ENDS = ("failed", "interrupted")

SERVICES: Mapping[str, Callable[[str, Settings], Tracker]] = {"mlflow": MLflow, "wandb": WandB}


@dataclass
class _Interval:
    """What was recorded in one second of the training clock."""

    steps: int = 0
    iteration: int = 0
    last_s: float = 0.0
    samples: int = 0
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    staleness: list[int] = field(default_factory=list)
    logged: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, record: StepRecord | MetricRecord) -> None:
        self.iteration = max(self.iteration, record.iteration)
        self.last_s = max(self.last_s, record.time_s)
        if isinstance(record, MetricRecord):
            self.logged[record.name].append(record.value)
            return
        self.steps += 1
        self.samples += record.samples
        for part in ("compute", "communication", "waiting"):
            self.spent_s[part] += getattr(record, f"{part}_s")
        if record.staleness >= 0:
            self.staleness.append(record.staleness)

    def values(self, *, length_s: float) -> dict[str, float]:
        """Means over the interval's steps and workers, by the name under which trackers show them."""
        # Not `math.fsum`, which raises where a script logs inf and -inf.
        found = {f"train/{name}": sum(values) / len(values) for name, values in self.logged.items()}
        if self.steps == 0:
            return found
        found["pace/samples_per_s"] = self.samples / length_s
        whole_s = sum(self.spent_s.values())
        if whole_s > 0:
            found |= {f"time/{part}": spent_s / whole_s for part, spent_s in self.spent_s.items()}
        if self.staleness:
            found["staleness/mean"] = sum(self.staleness) / len(self.staleness)
            found["staleness/max"] = max(self.staleness)
        return found


@final
class Feed:
    """Adds records up by seconds of the training clock, and tells trackers of each second.

    A second is told of once the one after the next has begun: by then all workers have sent their records of it.
    Whoever feeds waits for the trackers, and gets what they raise (see `Delivery`). They are closed with the feed.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._intervals: dict[int, _Interval] = defaultdict(_Interval)
        self._first_open = 0
        self._began_s = 0.0
        self._has_ended_badly = False

    def take(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, StepRecord | MetricRecord):
                # What comes too late for its own second counts in the first that has not been told yet.
                self._intervals[max(int(record.time_s / _INTERVAL_S), self._first_open)].add(record)
            elif isinstance(record, EvaluationRecord):
                values = {f"evaluation/{name}": value for name, value in record.metrics.items()}
                self._log(values, step=record.iteration, time_s=record.time_s)
            elif isinstance(record, EventRecord):
                if record.name == "training":
                    self._began_s = record.time_s
                self._has_ended_badly |= record.name in _UNHAPPY_ENDS
        newest = max(self._intervals, default=0)
        for second in sorted(second for second in self._intervals if second < newest - 1):
            self._tell(second)

    def close(self, *, is_finished: bool) -> None:
        """Tell the rest, and how the run ended: badly, too, where its own records say so."""
        for second in sorted(self._intervals):
            self._tell(second)
        for tracker in self._trackers:
            tracker.close(is_finished=is_finished and not self._has_ended_badly)

    def _tell(self, second: int) -> None:
        """The first second of a run may be a short one, as may the last."""
        interval = self._intervals.pop(second)
        begin_s, end_s = max(second * _INTERVAL_S, self._began_s), (second + 1) * _INTERVAL_S
        if not self._intervals:
            end_s = min(end_s, interval.last_s)
        self._first_open = second + 1
        length_s = end_s - begin_s if end_s > begin_s else _INTERVAL_S
        self._log(interval.values(length_s=length_s), step=interval.iteration, time_s=interval.last_s)

    def _log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        for tracker in self._trackers:
            tracker.log(values, step=step, time_s=time_s)


@final
class _Followed:
    """Watches a run for somebody else, and feeds its records to trackers."""

    def __init__(self, watcher: Watcher, feed: Feed) -> None:
        self._watcher, self._feed = watcher, feed

    def on_progress(self, progress: Progress) -> None:
        self._watcher.on_progress(progress)

    def on_output(self, who: str, line: str) -> None:
        self._watcher.on_output(who, line)

    def on_records(self, records: Sequence[Record]) -> None:
        self._watcher.on_records(records)
        self._feed.take(records)


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Who is told of runs while they train. Raises UsageError if a service is unknown or not installed."""

    tensorboard: Path | None = None
    """Where each run gets a directory of event files."""
    services: tuple[str, ...] = ()
    """`mlflow`, `wandb`."""
    _given_up: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Who failed in an earlier run: of a study's trials each would else wait for a service that does not answer."""

    def __post_init__(self) -> None:
        for service in self.services:
            if service not in SERVICES:
                raise unknown("tracker", service, SERVICES)
        for package in (*self.services, *(("tensorboard",) if self.tensorboard is not None else ())):
            load(package)

    @contextmanager
    def follow(self, watcher: Watcher, *, run: str, settings: Settings) -> Iterator[Watcher]:
        """A watcher that does what `watcher` does and feeds the trackers, which are closed at the end. One that fails
        is told of no later run. `run` is the run's name at every service, with a study's name before a slash."""
        openers = self._openers(run, settings)
        trackers = {name: Delivery(name, opened) for name, opened in openers if name not in self._given_up}
        if not trackers:
            yield watcher
            return
        feed = Feed([*trackers.values()])
        is_finished = False
        try:
            yield _Followed(watcher, feed)
            is_finished = True
        finally:
            feed.close(is_finished=is_finished)
            self._given_up.update(name for name, tracker in trackers.items() if tracker.is_given_up)

    def _openers(self, run: str, settings: Settings) -> Iterator[tuple[str, Callable[[], Tracker]]]:
        for service in dict.fromkeys(self.services):
            yield service, partial(SERVICES[service], run, settings)
        if self.tensorboard is not None:
            yield "tensorboard", partial(TensorBoard, self.tensorboard / run, settings)
