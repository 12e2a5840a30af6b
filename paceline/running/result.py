"""A finished run, read from its directory."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import UsageError
from paceline.records import (
    EvaluationRecord,
    EventRecord,
    MetricRecord,
    StepRecord,
    UpdateRecord,
    read_records,
    summarise,
)
from paceline.running import manifest
from paceline.strategies.traits import Unit
from paceline.training.clock import VIRTUAL, unit
from paceline.training.pauses import MODEL_FILE
from paceline.training.snapshot import read_model_file


@dataclass(frozen=True)
class Result:
    """The records of one run and what they add up to. Times are seconds on the training clock."""

    directory: Path

    @classmethod
    def open(cls, directory: str | Path) -> "Result":
        """The result in a directory. Raises UsageError if there is none."""
        result = cls(Path(directory))
        manifest.read(result.directory)
        return result

    def __str__(self) -> str:
        """What was run, how far it came, and where its files are."""
        name, workers = self.manifest["strategy"]["name"], self.manifest["num_workers"]
        lines = [
            f"{Path(self.manifest['program']).name}: {name} on {workers} worker{'' if workers == 1 else 's'}",
            f"{self.iteration:,} iterations in {self.training_time_s:.2f} {unit(self.engine)} of training",
            f"last evaluation: {summarise(self.metrics) or 'none'}",
            f"files in {self.directory}",
        ]
        return "\n".join(lines)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return manifest.read(self.directory)

    @property
    def engine(self) -> str:
        return str(self.manifest.get("engine", "ray"))

    @property
    def unit(self) -> Unit:
        """What an iteration is; an update where an older result does not say."""
        unit: Unit = self.manifest.get("unit", "update")
        return unit

    @property
    def is_virtual(self) -> bool:
        return self.engine == VIRTUAL

    @cached_property
    def steps(self) -> list[StepRecord]:
        return read_records(self.directory, StepRecord)

    @cached_property
    def evaluations(self) -> list[EvaluationRecord]:
        return read_records(self.directory, EvaluationRecord)

    @cached_property
    def events(self) -> list[EventRecord]:
        return read_records(self.directory, EventRecord)

    @cached_property
    def updates(self) -> list[UpdateRecord]:
        return read_records(self.directory, UpdateRecord)

    @cached_property
    def logged(self) -> list[MetricRecord]:
        return read_records(self.directory, MetricRecord)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that the last evaluation returned; empty before the first."""
        return dict(self.evaluations[-1].metrics) if self.evaluations else {}

    @property
    def iteration(self) -> int:
        """Global iterations trained.

        Where nobody counts for all, a step knows of some alone, and the run's events of all.
        """
        counted = [step.iteration for step in self.steps] + [event.iteration for event in self.events]
        return max(counted, default=0)

    @property
    def training_time_s(self) -> float:
        """How long the run trained. For a server whose clients are elsewhere, which takes no steps, its evaluations say
        it."""
        return max((record.time_s for record in self.steps or self.evaluations), default=0.0)

    @property
    def num_clients(self) -> int:
        """How many clients' updates have counted, where these are elsewhere."""
        return len({update.worker for update in self.updates}) if self.engine == "served" else 0

    @property
    def samples(self) -> int:
        return sum(step.samples for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        """Over the time that the records cover, which of a resumed run in a directory of its own is the last part."""
        began_s = min((s.time_s - s.compute_s - s.communication_s - s.waiting_s for s in self.steps), default=0.0)
        elapsed_s = self.training_time_s - began_s
        return self.samples / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def time_to_target_s(self) -> float | None:
        """When the target was reached; none if it never was, or none was set."""
        return next((event.time_s for event in self.events if event.name == "target_reached"), None)

    @property
    def shares(self) -> dict[str, float]:
        """The parts of all workers' time in compute, communication and waiting; they add up to 1."""
        parts = ("compute", "communication", "waiting")
        totals = {part: sum(getattr(step, f"{part}_s") for step in self.steps) for part in parts}
        whole = sum(totals.values())
        return {name: total / whole if whole else 0.0 for name, total in totals.items()}

    @property
    def hidden_share(self) -> float:
        """The part of the exchange's time, waiting included, that was hidden behind backward."""
        hidden_s = sum(step.hidden_s for step in self.steps)
        shown_s = sum(step.communication_s + step.waiting_s for step in self.steps)
        return hidden_s / (hidden_s + shown_s) if hidden_s else 0.0

    def model_state(self) -> dict[str, Tensor]:
        """The final global model, as for `model.load_state_dict`. Raises UsageError if the run saved none."""
        path = self.directory / MODEL_FILE
        if not path.exists():
            raise UsageError(f"{self.directory} holds no {MODEL_FILE}; the run did not come to its end")
        return read_model_file(path)
