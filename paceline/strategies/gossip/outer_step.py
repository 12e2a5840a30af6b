"""NoLoCo: a worker steps outward from where its last round began, with a neighbour in the place of everybody.

Kolehmainen et al., "NoLoCo: No-all-reduce low communication training method for large models", 2025, section 3.2. With
slow weights s and the weights x after local steps, its momentum is d <- a d + b mean(x - s) - g (s - mean(s)), where
means are of a pair and s <- s + d. With g = b, as its authors train, that is momentum with the pseudo-gradient
s - mean(x), and models travel as in any gossip. Here any outer optimizer takes that, in any topology.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, final

from torch import Tensor, nn

from paceline.outer import Outer
from paceline.server.state import export_state, import_state
from paceline.strategies.gossip.averaging import Averaging
from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.parcel import Parcel
from paceline.strategies.own_state import OUTER, taken_up
from paceline.topology import Topology

_SLOW = "slow."


@final
class OuterStep(Mixer):
    """Keeps the mean of all models but for the outer step.

    Args:
        outer: what steps on the slow weights.
        tell: records that the outer optimizer begins anew.
    """

    why_uncoded: ClassVar[str] = "steps from whole models, and its neighbours change"

    def __init__(
        self,
        topology: Topology,
        own: Parcel,
        *,
        rank: int,
        size: int,
        outer: Outer,
        tell: Callable[[str, Mapping[str, Any]], None] | None,
    ) -> None:
        super().__init__(topology, own, rank=rank, size=size)
        self._averaging = Averaging(topology, own, rank=rank, size=size)
        self._slow = [nn.Parameter(values.clone()) for values in own.values]
        self._outer, self._optimizer, self._tell = outer, outer.optimizer(self._slow), tell

    def outgoing(self, step: int) -> Mapping[int, Parcel]:
        return self._averaging.outgoing(step)

    def incoming(self, step: int) -> Mapping[int, Parcel]:
        return self._averaging.incoming(step)

    def mix(self, step: int, lost: Collection[int] = ()) -> None:
        self._averaging.mix(step, lost)
        for slow, values in zip(self._slow, self.own.values, strict=True):
            slow.grad = slow.detach() - values
        self._optimizer.step()
        self._optimizer.zero_grad()
        for slow, values in zip(self._slow, self.own.values, strict=True):
            values.copy_(slow.detach())

    def regroup(self, rank: int, size: int) -> None:
        """The round goes on: slow weights and the outer optimizer's state are this worker's own."""
        super().regroup(rank, size)
        self._averaging.regroup(rank, size)

    def state(self) -> dict[str, Tensor]:
        outer = export_state(self._optimizer, self._slow)
        slow = {f"{_SLOW}{place}": parameter.detach() for place, parameter in enumerate(self._slow)}
        return {**slow, **{f"{OUTER}{name}": tensor for name, tensor in outer.items()}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Without slow weights, as under another strategy before, a round begins where this worker's model is."""
        for place, (slow, values) in enumerate(zip(self._slow, self.own.values, strict=True)):
            slow.data.copy_(state.get(f"{_SLOW}{place}", values))
        import_state(self._optimizer, self._slow, taken_up(self._outer, state, tell=self._tell))
