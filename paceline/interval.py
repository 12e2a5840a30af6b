"""How often something is to come: after so many iterations, samples, batches or seconds."""

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from paceline.errors import UsageError

Unit = Literal["iterations", "samples", "batches", "s"]
_FORM = re.compile(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*")
_UNITS: dict[str, Unit] = {
    "iterations": "iterations",
    "iteration": "iterations",
    "samples": "samples",
    "sample": "samples",
    "batches": "batches",
    "batch": "batches",
    "s": "s",
}


class Count(NamedTuple):
    """How far a run is, in each unit."""

    iterations: int = 0
    samples: int = 0
    """Samples that all workers together have trained on."""
    batches: int = 0
    """Steps that all workers together have taken, each on a batch of its own."""
    s: float = 0.0
    """Seconds of the training clock."""

    def of(self, unit: Unit) -> float:
        return float(getattr(self, unit))


@final
@dataclass(frozen=True)
class Interval:
    """How far it is from one time to the next.

    >>> [str(Interval.parse(text)) for text in (100, "10000samples", "200 batches", "1e4samples", "30s", "1.5s")]
    ['100iterations', '10000samples', '200batches', '10000samples', '30s', '1.5s']
    """

    every: float
    unit: Unit = "iterations"

    @classmethod
    def parse(cls, given: "int | str | Interval", *, plain: Unit = "iterations") -> "Interval":
        """Read `100`, `100iterations`, `10000samples`, `200batches` or `30s`. Raises UsageError if it has another form.

        Args:
            plain: what a plain number counts.
        """
        if isinstance(given, Interval):
            return given
        match = _FORM.fullmatch(str(given))
        try:
            number, word = match.groups()  # type: ignore[union-attr]
            unit, every = _UNITS[word] if word else plain, float(number)
        except (AttributeError, ValueError, KeyError):
            raise UsageError(
                f"eval-every {given!r} is not of the form 100 (iterations), 10000samples, 200batches or 30s"
            ) from None
        if not 0 < every < math.inf:
            raise UsageError(f"eval-every must be positive, not {given}")
        if unit != "s" and every != int(every):
            raise UsageError(f"eval-every {given!r}: {unit} come in whole numbers")
        return cls(every, unit)

    def __str__(self) -> str:
        return f"{self.every:.15g}{self.unit}"

    @property
    def words(self) -> str:
        """As a sentence has it.

        >>> Interval.parse("10000samples").words
        '10,000 samples'
        """
        return f"{self.every:,.15g} {self.unit}"

    def has_come(self, since: Count, now: Count) -> bool:
        """Whether a multiple of it lies between the two, or at the second."""
        return now.of(self.unit) // self.every > since.of(self.unit) // self.every

    def left(self, since: Count, now: Count) -> float:
        """How much is missing to the first multiple after `since`, in its unit."""
        return (since.of(self.unit) // self.every + 1) * self.every - now.of(self.unit)
