"""A run so far, for those who watch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol

from paceline.records import EvaluationRecord, EventRecord, Record, StepRecord


@dataclass
class Progress:
    """The run so far, for those who watch."""

    iteration: int = 0
    time_s: float = 0.0
    began_s: float = 0.0
    """Time on the training clock when this run began; above zero where it was resumed."""
    samples: int = 0
    compute_s: float = 0.0
    communication_s: float = 0.0
    waiting_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    phase: str = "starting"
    num_workers: int | None = None
    """How many workers are there now, once some have come or gone; None: as many as the run began with."""
    not_saved: str | None = None
    """Why the last checkpoint was not written, if it was not."""
    how_to_go_on: str = ""
    """By which checkpoints of the script's own; empty: by Paceline's."""

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def take(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, StepRecord):
                self.iteration = max(self.iteration, record.iteration)
                self.time_s = max(self.time_s, record.time_s)
                self.samples += record.samples
                self.compute_s += record.compute_s
                self.communication_s += record.communication_s
                self.waiting_s += record.waiting_s
            elif isinstance(record, EvaluationRecord):
                self.metrics = record.metrics
            elif isinstance(record, EventRecord):
                self._take_event(record)

    def _take_event(self, event: EventRecord) -> None:
        match event.name:
            case "training":
                self.phase = "training"
                self.began_s = event.time_s
            case "checkpoint":
                self.iteration = max(self.iteration, event.iteration)
                self.not_saved = None
            case "not_saved":
                self.not_saved = str(event.details["error"])
            case "saves_itself":
                self.how_to_go_on = f"this script saves by itself: {event.details['how']}"
            case "lost" | "left":  # under servers the others meet only later
                self.num_workers = event.details.get("left", self.num_workers)
            case "reformed":
                self.num_workers = len(event.details["ranks"])


class LauncherLost(NamedTuple):
    """A launcher's death, after which another one goes on."""

    process: int
    why: str
    """The signal's name."""
    iteration: int
    """The iteration that the run had come to."""
    resumed_at: int
    """The iteration of the checkpoint that it goes on from."""

    def __str__(self) -> str:
        return (
            f"resumed by the guard from iteration {self.resumed_at}, after the launcher's death at iteration "
            f"{self.iteration} (process {self.process}, {self.why})"
        )


class Watcher(Protocol):
    """Who looks on: a progress bar, or nobody. Subclasses say what they look at."""

    def on_progress(self, progress: Progress) -> None:
        return None

    def on_output(self, who: str, line: str) -> None:
        return None

    def on_records(self, records: Sequence[Record]) -> None:
        return None
