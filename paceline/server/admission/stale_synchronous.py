"""SSP and ASP: each contribution is an update, and nobody gets too far ahead."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar, final

from paceline.membership import Membership
from paceline.server.admission.rule import AdmissionRule, ProtocolError


@final
class StaleSynchronous(AdmissionRule):
    """SSP: gradients are applied on arrival; a worker runs at most `staleness` clocks ahead of the slowest.

    Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
    With infinite staleness nobody ever waits: ASP (Hogwild!-style asynchrony over a server; Dean et al. 2012).
    """

    joins: ClassVar[bool] = False

    def __init__(self, members: Membership, *, staleness: float = math.inf, torn_reads: bool = False) -> None:
        super().__init__(members)
        if not staleness >= 0:
            raise ValueError(f"staleness must be at least 0, not {staleness}")
        self._staleness = staleness
        self.is_free = staleness == math.inf
        # With a bound, workers wait for others at any step, and the server would take its shard back as often.
        self.torn_reads, self.is_plain = torn_reads, self.is_free and not torn_reads
        self.resume(dict.fromkeys(members.ranks, 0))

    def resume(self, clocks: Mapping[int, int]) -> None:
        self._clocks = dict(clocks)
        self._num_at = Counter(clocks[worker] for worker in self.active)  # active workers, by their clocks
        self._slowest = min(self._num_at, default=0)

    def for_another_shard(self) -> AdmissionRule:
        return StaleSynchronous(self.members, staleness=self._staleness, torn_reads=self.torn_reads)

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        self.require_active(sender)
        if clock != self._clocks[sender]:
            raise ProtocolError(f"worker {sender} pushed for clock {clock}, but is at {self._clocks[sender]}")
        if not self.is_admitted(sender):
            raise ProtocolError(f"worker {sender} pushed for clock {clock} without having been admitted to it")
        self._clocks[sender] += 1
        self._num_at[clock + 1] += 1
        self._take_from(clock)
        return (sender,)

    def is_held(self, sender: int) -> bool:
        return False

    def is_admitted(self, worker: int) -> bool:
        return not self.active or self._clocks[worker] - self._slowest <= self._staleness

    def clock_of(self, worker: int) -> int:
        return self._clocks[worker]

    @property
    def complete(self) -> int:
        return self._slowest

    def join(self, worker: int) -> None:
        """The worker begins beside the slowest: it has missed what these have done."""
        self.add(worker)
        self._clocks[worker] = self._slowest
        self._num_at[self._slowest] += 1

    def begin_with(self, worker: int, clock: int) -> tuple[int, ...]:
        before, self._clocks[worker] = self._clocks[worker], clock
        self._num_at[clock] += 1
        self._take_from(before)
        return ()

    def leave(self, worker: int) -> tuple[int, ...]:
        if worker in self.active:
            self.active.discard(worker)
            self._take_from(self._clocks[worker])
        return ()

    def _take_from(self, clock: int) -> None:
        """A worker is no longer at this clock; the slowest may be further on."""
        self._num_at[clock] -= 1
        while self.active and not self._num_at[self._slowest]:
            del self._num_at[self._slowest]
            self._slowest += 1
