"""How a trial ended: the file that makes its directory final."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UsageError

FILE_NAME = "trial.json"


@dataclass(frozen=True)
class TrialOutcome:
    """A trial's end. A trial without one is still to be run."""

    status: str
    """`finished` or `failed`."""
    reason: str
    """Why it failed; empty if it did not."""
    wall_s: float
    """How long it took with start-up and evaluation, from which the rest of a study is estimated."""

    def __post_init__(self) -> None:
        # Output of a dead process may hold what is no text, which no file and no terminal would take.
        object.__setattr__(self, "reason", self.reason.encode("utf-8", "backslashreplace").decode())

    def write(self, directory: Path) -> None:
        (directory / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> TrialOutcome | None:
        """The outcome in a trial's final directory; none if there is none.

        Raises:
            UsageError: the file is no outcome.
        """
        path = directory / FILE_NAME
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} does not say how the trial ended: {error}; remove {directory}") from None
