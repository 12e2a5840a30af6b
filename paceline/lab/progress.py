"""What a person sees of a study that is under way."""

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from rich.console import Console

from paceline.engines.standing import Watcher
from paceline.lab import trace as timeline
from paceline.lab import words
from paceline.lab.frames import FINISHED
from paceline.lab.reaching import first_reaching
from paceline.lab.runner import Position, TrialOutcome
from paceline.lab.spec import StudySpec, Trial
from paceline.lab.tracking import Tracking
from paceline.records import summarise
from paceline.running import manifest
from paceline.running.result import Result
from paceline.running.watching import ProgressLine


@final
class StudyProgress:
    """Shows a line that moves while a trial runs, and one that stays once it has ended."""

    def __init__(self, console: Console, spec: StudySpec, study: str, *, tracking: Tracking, timelines: bool) -> None:
        self._console, self._spec, self._study = console, spec, study
        self._tracking, self._timelines = tracking, timelines

    @contextmanager
    def trial(self, trial: Trial, position: Position) -> Iterator[Watcher]:
        began_s = time.monotonic()

        def outlook() -> str:
            if position.left_s is None:
                return ""
            return f"{words.seconds(max(1.0, position.left_s - (time.monotonic() - began_s)))} left"

        config = self._spec.config(trial.seed)
        settings: dict[str, str | int | float] = {
            "study": self._study,
            "script": self._spec.script,
            "arguments": shlex.join(self._spec.arguments),
            "target": self._spec.target or "none",
            "strategy": trial.variant.text,
            "workers": trial.workers,
            "seed": trial.seed,
            "engine": self._spec.engine,
            "cluster": self._spec.cluster.name if self._spec.cluster is not None else "none",
        }
        with (
            ProgressLine(
                self._console, _label(trial, position), config, engine=self._spec.engine, outlook=outlook
            ) as line,
            self._tracking.follow(line, run=f"{self._study}/{trial.id}", settings=settings) as watcher,
        ):
            yield watcher

    def on_outcome(self, trial: Trial, position: Position, outcome: TrialOutcome, directory: Path) -> None:
        """Say what came of the trial. What goes wrong with that is said, too: it is not worth a study."""
        label = _label(trial, position)
        try:
            has_finished = outcome.status == FINISHED
            said = _achieved(Result(directory), self._spec, trial) if has_finished else f"failed: {outcome.reason}"
            self._say(f"{label}: {said}")
            if self._timelines and (directory / manifest.FILE_NAME).exists():
                timeline.write(directory)
        except Exception as error:
            self._say(f"{label}: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _label(trial: Trial, position: Position) -> str:
    return f"{position.number}/{position.num_trials} {trial.label}"


def _achieved(result: Result, spec: StudySpec, trial: Trial) -> str:
    metrics = summarise(result.metrics) or "no evaluation"
    target = spec.config(trial.seed).target
    if target is None:
        return metrics
    reaching = first_reaching(result.evaluations, target, spec.hold)
    if reaching is None:
        return f"{metrics}, target not reached"
    return f"{summarise(reaching.evaluation.metrics)} after {words.duration(reaching.evaluation.time_s, result.engine)}"
