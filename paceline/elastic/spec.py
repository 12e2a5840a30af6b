"""What an elastic run is asked for."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, final, get_args

from paceline.errors import UsageError

GlobalBatch = Literal["keep", "grow"]


@final
@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How many workers a run may go on with, and what becomes of its global batch. Raises UsageError for values out of
    range.

    >>> Elastic.parse("2:4")
    Elastic(at_least=2, at_most=4, global_batch='keep', deadline_s=3.0, replacements=0)
    """

    at_least: int
    """The run ends where fewer workers are left."""
    at_most: int
    """No more can join."""
    global_batch: GlobalBatch = "keep"
    """keep: an update is made of as many samples as at the start, in more steps of the script; grow: of as many as the
    workers that are there have in a batch each."""
    deadline_s: float = 3.0
    """A worker that is not heard of for so long is ended."""
    replacements: int = 0
    """So many times a new worker starts in the place of one that has died."""

    def __post_init__(self) -> None:
        if not 1 <= self.at_least <= self.at_most:
            raise UsageError(f"--elastic {self.at_least}:{self.at_most}: MIN must be at least 1 and at most MAX")
        if self.global_batch not in get_args(GlobalBatch):
            raise UsageError(f"--global-batch must be keep or grow, not {self.global_batch!r}")
        if self.replacements < 0:
            raise UsageError(f"--replace must be 0 or more, not {self.replacements}")
        if not self.deadline_s >= 1:
            raise UsageError(f"the deadline of an elastic run must be at least 1 s, not {self.deadline_s:g}")

    @classmethod
    def parse(cls, text: str, *, global_batch: GlobalBatch = "keep", replacements: int = 0) -> Self:
        """Read `MIN:MAX`. Raises UsageError if the text has another form."""
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
        if match is None:
            raise UsageError(f"--elastic {text!r} is not of the form MIN:MAX, such as 2:4")
        at_least, at_most = int(match[1]), int(match[2])
        return cls(at_least=at_least, at_most=at_most, global_batch=global_batch, replacements=replacements)

    def require(self, *, num_workers: int) -> None:
        """Raises UsageError for a number of workers that the run cannot start with."""
        if not self.at_least <= num_workers <= self.at_most:
            raise UsageError(
                f"--elastic {self.at_least}:{self.at_most} is for {self.at_least} to {self.at_most} workers, and the "
                f"run would start with --workers {num_workers}"
            )

    def require_each(self, check: Callable[[int], None]) -> None:
        """Raises UsageError for a number of workers that the run may come to, if `check` raises one for it."""
        for number in range(self.at_least, self.at_most + 1):
            try:
                check(number)
            except UsageError as error:
                bounds = f"{self.at_least}:{self.at_most}"
                raise UsageError(
                    f"--elastic {bounds}: the run may come to have {number} workers, for which it is refused: {error}"
                ) from None
