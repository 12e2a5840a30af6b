"""A federated run's two ends as each sees the other, where clients are processes of somebody's, on other machines."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.layout import TensorSpec


class ClientUpdate(NamedTuple):
    """What came from a client that is elsewhere. Nothing of it can be relied on but the tensors' shapes and dtypes."""

    client: int
    tensors: Sequence[Tensor]
    weight: float
    """The samples that it says it has, within bounds, or 1 where clients count alike; times how often it was drawn."""
    scale: float
    """How many steps it says that its change is worth: any positive number."""


class Total(NamedTuple):
    """A round's sum, of which nobody knows the parts."""

    sum: Tensor
    """The sum of the vectors times their weights, 1-D, float64."""
    weight: float
    num_summed: int


class SumOfClients(Protocol):
    """Adds up what clients hide from the server."""

    def total(self, vectors: Mapping[int, tuple[float, Tensor]], *, round_number: int) -> Total:
        """The sum over the round's clients, each with a weight and a vector of its own, as far as they are played here.
        Collective call. Raises UsageError, on all workers, where there is no sum."""


class ClientsElsewhere(SumOfClients, Protocol):
    """The clients of a server, each a process of somebody's, elsewhere."""

    coding_seed: int
    """The seed of codecs, the same at both ends."""
    outweigh: float
    """A client counts at most so many times as much as the median one of its round."""

    def describe(
        self, state: Sequence[TensorSpec], update: Sequence[TensorSpec], *, current: Callable[[], Sequence[Tensor]]
    ) -> None:
        """What goes to clients, as it is now, and what comes from them."""

    def collect(self, number: int, take: Callable[[ClientUpdate], None]) -> bool:
        """One round. Where clients hide their updates, its sum is `total` afterwards, and `take` is not called.

        Args:
            number: its number; a server that was ended in a round begins it again.
            take: called with each update. Raises ValueError, which says why, for one that does not count.

        Returns:
            Whether the run is to end, so that nothing of the round counts.
        """

    def tell(self, text: str) -> None:
        """Say something in the server's log."""


class ServerElsewhere(Protocol):
    """The server of a client."""

    client: int
    """This client's number."""
    coding_seed: int
    """The seed of codecs, the same at both ends."""

    @property
    def round(self) -> int:
        """The number of the round that it takes part in."""

    @property
    def counted(self) -> int:
        """The last round in which this client's update counted, as far as the server has said; -1: none."""

    def attach(self, state: Sequence[TensorSpec], update: Sequence[TensorSpec], *, samples: int) -> None:
        """This is what is exchanged, and how many samples the client has."""

    def next_turn(self, state: Sequence[Tensor]) -> bool:
        """Wait for the client's next turn, and put the server's state in these tensors; returns whether the run is
        over, and there is none. Raises UsageError where the server refuses this client."""

    def send(self, update: Sequence[Tensor], *, scale: float) -> None:
        """What the turn came to."""

    def pulse(self) -> None:
        """Say now and then, at little cost, that the turn goes on. Raises as `next_turn`."""

    def leave(self) -> None:
        """Take no further turn."""
