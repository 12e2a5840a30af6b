"""D-PSGD: every worker takes the weighted mean of its own model and its neighbours'.

Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017, algorithm 1, which mixes
while it adapts: x <- W x - g. Adapting before mixing, x <- W (x - g), is nearer to the optimum (Cattivelli and Sayed,
"Diffusion LMS strategies for distributed estimation", IEEE Transactions on Signal Processing 58(3), 2010).
"""

from collections.abc import Collection, Mapping
from typing import final

from paceline.strategies.gossip.mixer import Mixer, weigh
from paceline.strategies.gossip.parcel import Parcel


@final
class Averaging(Mixer):
    """Keeps the mean of all models where the topology's weights do."""

    def outgoing(self, step: int) -> Mapping[int, Parcel]:
        return dict.fromkeys(self.near(step).sends_to, self.own)

    def incoming(self, step: int) -> Mapping[int, Parcel]:
        return self.kept(self.near(step).receives_from)

    def mix(self, step: int, lost: Collection[int] = ()) -> None:
        """The weights of those who are there add up to one."""
        near = self.near(step)
        weights = {sender: weight for sender, weight in near.receives_from.items() if sender not in lost}
        total = near.own_weight + sum(weights.values()) if lost else 1.0
        parcels = self.kept(near.receives_from)
        weigh(self.own, parcels, near.own_weight / total, {sender: each / total for sender, each in weights.items()})
