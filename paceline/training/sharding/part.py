"""One rank's part of a global batch, as it comes from its source, and its place in the data."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

DIFFERS = "differs_by_rank"
"""The attribute of a data set whose samples are meant to be others on each rank."""
DIFFERS_BY_RUN = "differs_by_run"
"""The attribute of a data set whose samples are meant to be others than the run's that is gone on with."""


class Part(NamedTuple):
    """A tuple, since loader workers send it, and torch pins the memory of what is in tuples."""

    data: Any
    num_samples: int
    weight: float
    """This rank's share of the global batch, times the number of ranks; 1 where all have equally many samples."""
    digest: str | None = None
    """For an epoch's first part, from streams that must be the same on every rank: what all ranks' samples are."""
    state: Any = None
    """The data set's own state after this part, if it has one."""


class Place(NamedTuple):
    """Where in the data a rank is."""

    epoch: int
    num_batches_done: int
    """Batches of that epoch."""
    state: Any = None
    """The data set's own state there, if it has one."""


class Source(Protocol):
    """Where the parts of one rank come from."""

    is_even: bool
    """False: it is known that some parts have another weight than 1."""

    def __len__(self) -> int:
        """Parts of an epoch.

        Raises:
            TypeError: nobody knows.
        """

    def parts(self, place: Place) -> Iterator[Part]:
        """What is left of the epoch from there."""

    def identity(self) -> dict[str, Any]:
        """What is the same on every rank, and in a run that goes on with the same data, by name."""
