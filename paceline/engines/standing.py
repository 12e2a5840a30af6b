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
            elif isinstance(record, EventRecord) and record.name == "training":
                self.phase = "training"
                self.began_s = record.time_s
            elif isinstance(record, EventRecord) and record.name == "checkpoint":
                self.iteration = max(self.iteration, record.iteration)
                self.not_saved = None
            elif isinstance(record, EventRecord) and record.name == "not_saved":
                self.not_saved = str(record.details["error"])
            elif isinstance(record, EventRecord) and record.name == "saves_itself":
                self.how_to_go_on = f"this script saves by itself: {record.details['how']}"


class LauncherLost(NamedTuple):
    """A launcher's death, after which another one goes on."""

    process: int
    why: str
    """The signal's name."""
    iteration: int
    """That the run had come to."""
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
