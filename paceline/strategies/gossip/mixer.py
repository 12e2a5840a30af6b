"""The contract of a mixer: what a worker sends at a step, and what becomes of its model. No network, no clock."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, final

from torch import Tensor

from paceline.strategies.gossip.parcel import Message, Parcel
from paceline.topology import Neighbours, Topology


class Mixer(ABC):
    """One worker's. Steps are counted from 0, exchanges alone."""

    missing_messages: ClassVar[str] = ""
    """As the trait of that name."""
    why_uncoded: ClassVar[str] = ""
    """What a codec would make of its messages; empty for means, which differences to shared estimates take over."""
    message_size: ClassVar[float] = 1.0
    """Of a message, in models of 4 bytes a parameter."""

    def __init__(self, topology: Topology, own: Parcel, *, rank: int, size: int) -> None:
        self.topology, self.own, self.rank, self.size = topology, own, rank, size
        self._received: list[Parcel] = []

    @abstractmethod
    def outgoing(self, step: int) -> Mapping[int, Message]:
        """What each receiver is sent."""

    @abstractmethod
    def incoming(self, step: int) -> Mapping[int, Message]:
        """Where each sender's message is to be put."""

    @abstractmethod
    def mix(self, step: int, lost: Collection[int] = ()) -> None:
        """Join what is there with this worker's own. Nothing came from the senders in `lost`."""

    def regroup(self, rank: int, size: int) -> None:
        """So many take part from here on, and this worker has this place among them. All begin anew with the values
        that they have: what is on its way counts no more, and may still be written where it was to be put."""
        self.rank, self.size = rank, size
        self._received = []

    def update(self, step: Callable[[], object]) -> None:
        """Have the optimizer step on this worker's own values."""
        step()

    def state(self) -> dict[str, Tensor]:
        """What the next exchanges depend on besides the own values."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, as far as it is there: in place."""
        for name, tensor in self.state().items():
            if name in state:
                tensor.copy_(state[name])

    def coding_s(self, step: int, *, operation_s: float) -> tuple[float, float]:
        """What a host of speed 1 takes to encode what is sent, and to decode what came.

        Args:
            operation_s: of each operation, besides its bytes.
        """
        return 0.0, 0.0

    @final
    def near(self, step: int) -> Neighbours:
        return self.topology.neighbours(step, self.rank, self.size)

    @final
    def kept(self, senders: Mapping[int, float]) -> dict[int, Parcel]:
        """A parcel for each sender, the same again at every step."""
        while len(self._received) < len(senders):
            self._received.append(self.own.alike())
        return dict(zip(senders, self._received, strict=False))


def weigh(own: Parcel, others: Mapping[int, Parcel], own_weight: float, weights: Mapping[int, float]) -> None:
    """`own` becomes the weighted sum, value by value."""
    for index, values in enumerate(own.values):
        values.mul_(own_weight)
        for sender, weight in weights.items():
            values.add_(others[sender].values[index], alpha=weight)
