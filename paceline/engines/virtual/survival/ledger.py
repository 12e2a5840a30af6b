"""What simulated workers' time went into, and what their hosts cost."""

from dataclasses import dataclass, field
from typing import Any, final


@final
@dataclass
class Ledger:
    """Seconds of workers, in virtual time. Each is there from when its host is taken until it dies, leaves or ends."""

    lost_regrouping_s: float = 0.0
    """Workers that were left waited to notice, and to meet anew."""
    lost_steps_s: float = 0.0
    """Workers had computed what died with them, or what was done again."""
    lost_starting_s: float = 0.0
    """Workers started, and took the others' state; or all were away until a run began anew."""
    worker_s: float = 0.0
    cost: float = 0.0
    _there: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By rank: since when it is there, and its price a second."""
    _coming: dict[int, float] = field(default_factory=dict)

    def begins(self, rank: int, now_s: float, *, price_per_hour: float, joins: bool = False) -> None:
        self._there[rank] = now_s, price_per_hour / 3600
        if joins:
            self._coming[rank] = now_s

    def is_coming(self, rank: int) -> bool:
        return rank in self._coming

    def has_joined(self, rank: int, now_s: float) -> None:
        self.lost_starting_s += now_s - self._coming.pop(rank)

    def ends(self, rank: int, now_s: float) -> None:
        """The second call does nothing."""
        if rank in self._there:
            since_s, price_per_s = self._there.pop(rank)
            self.worker_s += now_s - since_s
            self.cost += (now_s - since_s) * price_per_s
        if rank in self._coming:
            self.has_joined(rank, now_s)

    def waits(self, num_workers: int, *, again_s: float, down_s: float, price_per_hour: float) -> None:
        """All of these do so much again, and have waited so long for a host before."""
        self.worker_s += num_workers * down_s
        self.lost_starting_s += num_workers * down_s
        self.lost_steps_s += num_workers * again_s
        self.cost += price_per_hour / 3600 * down_s

    def close(self, now_s: float) -> None:
        for rank in list(self._there):
            self.ends(rank, now_s)

    @property
    def lost_s(self) -> float:
        return self.lost_regrouping_s + self.lost_steps_s + self.lost_starting_s

    def details(self) -> dict[str, Any]:
        """As an event's."""
        return {
            "goodput": 1 - self.lost_s / self.worker_s if self.worker_s else 1.0,
            "worker_s": self.worker_s,
            "lost_regrouping_s": self.lost_regrouping_s,
            "lost_steps_s": self.lost_steps_s,
            "lost_starting_s": self.lost_starting_s,
            "cost": self.cost,
        }
