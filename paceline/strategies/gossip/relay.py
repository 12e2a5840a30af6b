"""RelaySum: models travel along a tree, so that every worker takes the exact mean of models, older the farther away.

Vogels et al., "RelaySum for decentralized deep learning on heterogeneous data", NeurIPS 2021, algorithm 1. A message is
the sum of the models behind a link, with their number, which grows from 0 in the first steps.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar, final

from torch import Tensor

from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.parcel import Parcel
from paceline.topology import Topology


def require_tree(topology: Topology, size: int) -> None:
    """Raises ValueError unless the links go both ways, join all workers without a cycle, and stay."""
    near = [set(topology.neighbours(0, rank, size).receives_from) for rank in range(size)]
    is_two_way = all(set(topology.neighbours(0, rank, size).sends_to) == near[rank] for rank in range(size))
    has_no_cycle = topology.joins_all(size) and sum(map(len, near)) == 2 * (size - 1)
    if topology.period(size) > 1 or not is_two_way or not has_no_cycle:
        raise ValueError(f"{topology} is no tree of {size} workers; chain, star and tree are")


@final
class Relay(Mixer):
    """Each link has its last message, which goes into the next ones to all others."""

    why_uncoded: ClassVar[str] = "hands sums of models on, each with all that codecs left out of them before"

    def __init__(self, topology: Topology, own: Parcel, *, rank: int, size: int) -> None:
        super().__init__(topology, own, rank=rank, size=size)
        own.number = 1.0
        self._begin()

    def _begin(self) -> None:
        """Nothing has come over any link yet."""
        near = self.near(0).receives_from
        self._came = {other: self.own.alike() for other in near}
        self._sent = {other: self.own.alike() for other in near}

    def outgoing(self, step: int) -> Mapping[int, Parcel]:
        for receiver, parcel in self._sent.items():
            parcel.buffer.copy_(self.own.buffer)
            _add(parcel, {other: came for other, came in self._came.items() if other != receiver})
        return self._sent

    def incoming(self, step: int) -> Mapping[int, Parcel]:
        return self._came

    def mix(self, step: int, lost: Collection[int] = ()) -> None:
        """A message that is lost counts as one of no models, here and where this worker's next ones go."""
        for sender in lost:
            self._came[sender].buffer.zero_()
        _add(self.own, self._came)
        for values in self.own.values:
            values.div_(self.own.number)
        self.own.number = 1.0

    def regroup(self, rank: int, size: int) -> None:
        """Along another tree, where sums are those of no models at first."""
        super().regroup(rank, size)
        self._begin()

    def state(self) -> dict[str, Tensor]:
        return {f"came.{other}": parcel.buffer for other, parcel in self._came.items()}


def _add(total: Parcel, parcels: Mapping[int, Parcel]) -> None:
    for parcel in parcels.values():
        for values, others in zip(total.values, parcel.values, strict=True):
            values.add_(others)
        total.number += parcel.number
