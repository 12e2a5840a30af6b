"""Push-sum, for links that need not go both ways.

Assran et al., "Stochastic gradient push for distributed deep learning", ICML 2019, algorithm 1; Kempe et al.,
"Gossip-based computation of aggregate information", FOCS 2003. Each sender shares its sum x and its weight w out evenly
among its receivers and itself; every worker trains at x / w, and its step is added to x.
"""

from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.strategies.gossip.mixer import Mixer, weigh
from paceline.strategies.gossip.parcel import Parcel
from paceline.topology import Topology


def share(topology: Topology, step: int, rank: int, size: int) -> float:
    """What a sender gives each of its receivers, and keeps."""
    return 1 / (1 + len(topology.neighbours(step, rank, size).sends_to))


def push(own: Parcel, weight: float, step: Callable[[], object]) -> None:
    """A step of x is 1 / w as long for x / w. Where every worker has as many senders as receivers, w stays 1."""
    if weight == 1.0:
        step()
        return
    before = [values.clone() for values in own.values]
    step()
    for values, old in zip(own.values, before, strict=True):
        torch.lerp(old, values, 1 / weight, out=values)


@final
class PushSum(Mixer):
    """The parcels' values are x / w, and their number is w: so x / w after an exchange is a weighted mean."""

    missing_messages: ClassVar[str] = (
        "with each, push-sum loses a part of the sums and weights for ever, so that no worker finds the mean; use "
        "--strategy gossip --option mode=running-sums"
    )

    why_uncoded: ClassVar[str] = "sends parts of sums and weights, and what a codec leaves out of one is lost to all"

    def __init__(self, topology: Topology, own: Parcel, *, rank: int, size: int) -> None:
        super().__init__(topology, own, rank=rank, size=size)
        self._weight = torch.ones(1, dtype=torch.float64)
        own.number = 1.0

    @property
    def weight(self) -> float:
        return float(self._weight)

    def outgoing(self, step: int) -> Mapping[int, Parcel]:
        self.own.number = self.weight
        return dict.fromkeys(self.near(step).sends_to, self.own)

    def incoming(self, step: int) -> Mapping[int, Parcel]:
        return self.kept(self.near(step).receives_from)

    def mix(self, step: int, lost: Collection[int] = ()) -> None:
        parcels = {sender: parcel for sender, parcel in self.incoming(step).items() if sender not in lost}
        gained = {
            sender: share(self.topology, step, sender, self.size) * parcel.number for sender, parcel in parcels.items()
        }
        kept = share(self.topology, step, self.rank, self.size) * self.weight
        total = kept + sum(gained.values())
        weigh(self.own, parcels, kept / total, {sender: weight / total for sender, weight in gained.items()})
        self._weight.fill_(total)

    def regroup(self, rank: int, size: int) -> None:
        """With weights of 1, which add up to the number of workers again: one who dies takes its weight along."""
        super().regroup(rank, size)
        self._weight.fill_(1.0)

    def update(self, step: Callable[[], object]) -> None:
        push(self.own, self.weight, step)

    def state(self) -> dict[str, Tensor]:
        return {"weight": self._weight}
