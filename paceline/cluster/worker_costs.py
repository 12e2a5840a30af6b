"""Exchanges cost workers time besides what passes the links. The virtual engine and plans take these prices from here.

Messages that a worker sends one after the other, and does nothing in between, are a burst. Its first one takes longer
than the others: a worker that has just computed, or waited, finds other things in its core's caches, and who receives
has to wake up.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

from paceline.cluster.description import Cluster

_US = 1e-6


class Cost(NamedTuple):
    """A worker spends this on an operation or a message."""

    time_s: float
    core_s: float
    """For so long of that a core works that hosts share; 0 where they share none."""


_NOTHING = Cost(0.0, 0.0)


@final
@dataclass(frozen=True)
class WorkerCosts:
    """The prices of a cluster, which are 0 where its file does not give them."""

    operation: Cost = _NOTHING
    """A collective operation, besides its hops."""
    message: Cost = _NOTHING
    """Sending the first message of a burst."""
    further_message: Cost = _NOTHING
    """Sending each other one."""
    taken_core_s: float = 0.0
    """A core that hosts share works for so long to take in a message from another host."""

    @classmethod
    def of(cls, cluster: Cluster) -> "WorkerCosts":
        """Both ends of a further message do as much. What the first one takes more is its sender's."""
        costs, share = cluster.communication, float(cluster.shared_cores is not None)
        taken_core_s = share * costs.further_message_core_s / 2

        def sent(time_s: float, core_s: float) -> Cost:
            """The rest is the receiver's."""
            return _cost(time_s - taken_core_s, share * core_s - taken_core_s)

        return cls(
            operation=_cost(costs.operation_us * _US, share * costs.operation_core_us * _US),
            message=sent(costs.message_us * _US, costs.message_core_us * _US),
            further_message=sent(costs.further_message_s, costs.further_message_core_s),
            taken_core_s=taken_core_s,
        )

    def burst(self, num_messages: float) -> Cost:
        """Sending so many, one after the other."""
        first, further = min(1.0, num_messages), max(0.0, num_messages - 1)
        return Cost(
            first * self.message.time_s + further * self.further_message.time_s,
            first * self.message.core_s + further * self.further_message.core_s,
        )


def _cost(time_s: float, core_s: float) -> Cost:
    return Cost(max(time_s, core_s), core_s)
