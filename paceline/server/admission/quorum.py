"""A round ends once enough workers have contributed to it."""

import math
from typing import final

from paceline.membership import Membership
from paceline.server.admission.following import Following
from paceline.server.admission.rule import AdmissionRule, Decisions, ProtocolError


@final
class Quorum(AdmissionRule):
    """Asynchronous rounds: one update of the first `quorum` contributions, and of those that come in the grace after.

    Nobody waits for slower workers, and nothing that they computed is lost: what comes later counts in the round that
    is open then (Liu et al., "Asynchronous local-SGD training for language modeling", 2024, section 2, whose quorum is
    one). After the last round before a pause all workers meet anyway. So this round is of everybody, and in a pause no
    contribution is held.

    A worker that waits for the others at a place of their scripts is not one that a round waits for.

    What somebody has contributed who is gone since waits for somebody who is there: who has contributed to a round
    tells other shards of it. When nobody is left, what waits is a round, here and on all other shards.

    Args:
        quorum: contributions that a round needs; all, where fewer workers are left.
        grace_s: for how long a round stays open once it has these, unless everybody's are there.
    """

    def __init__(self, members: Membership, *, quorum: int, grace_s: float = 0.0) -> None:
        super().__init__(members)
        if not 1 <= quorum <= members.size or not 0 <= grace_s < math.inf:
            raise ValueError(
                f"quorum must be in 1..{members.size}, not {quorum}, and grace_s at least 0, not {grace_s}"
            )
        self._quorum, self._grace_s = quorum, grace_s
        self.contributors = ()
        self.is_timed = grace_s > 0
        self._clock = 0
        self._meets_at: float = math.inf
        self._held: set[int] = set()
        self._aside: set[int] = set()
        self._begins: dict[int, int] = {}  # by worker that has joined, until it pushes: its first clock
        self._decided: dict[int, tuple[int, ...]] = {}

    def for_another_shard(self) -> AdmissionRule:
        return Following(self.members, takes_late=True)

    def expect_pause(self, num_updates: int) -> None:
        self._meets_at = self._clock + num_updates

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        self.require_active(sender)
        if clock > self._clock or sender in self._held:
            raise ProtocolError(f"worker {sender} pushed for clock {clock} while clock {self._clock} is open")
        # All shards have answered what it pushed before, and so have come to this clock.
        self._decided = {before: senders for before, senders in self._decided.items() if before >= clock}
        self._begins.pop(sender, None)
        self._held.add(sender)
        return self._close() if self._is_full(waits=self.is_timed) else ()

    def tick(self, now_s: float) -> tuple[int, ...]:
        if not self._is_full(waits=False):
            self.wakes_at_s = None
        elif self.wakes_at_s is None:
            self.wakes_at_s = now_s + self._grace_s
        elif now_s >= self.wakes_at_s:
            return self._close()
        return ()

    def is_held(self, sender: int) -> bool:
        return sender in self._held

    def is_admitted(self, worker: int) -> bool:
        return worker not in self._held

    def clock_of(self, worker: int) -> int:
        return self._begins.get(worker, self._clock)

    @property
    def decided(self) -> Decisions:
        return self._decided

    def join(self, worker: int) -> None:
        self.add(worker)

    def begin_with(self, worker: int, clock: int) -> tuple[int, ...]:
        self._begins[worker] = clock
        # Another shard has come that far by itself: when it heard of this worker, nobody was left there.
        return self._close() if clock > self._clock and self._held else ()

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        self._aside.discard(worker)
        self._begins.pop(worker, None)
        return self._close() if self._is_full(waits=self.is_timed) else ()

    def step_aside(self, worker: int) -> tuple[int, ...]:
        self.require_active(worker)
        self._aside.add(worker)
        return self._close() if self._is_full(waits=self.is_timed) else ()

    def come_back(self, worker: int) -> None:
        self.require_active(worker)
        self._aside.discard(worker)

    def _is_full(self, *, waits: bool) -> bool:
        """Whether a round can be made; `waits`: of everybody's contributions alone."""
        if self._held.isdisjoint(self.active) and self.active:
            return False
        awaited = self.active - self._aside
        # A worker that is gone since its push still counts: its contribution is here.
        if waits or self._clock + 1 >= self._meets_at:
            return bool(self._held) and self._held >= awaited
        return len(self._held) >= max(1, min(self._quorum, len(awaited | self._held)))

    def _close(self) -> tuple[int, ...]:
        contributors = self.contributors = tuple(sorted(self._held))
        self._decided[self._clock] = contributors
        self._held.clear()
        self._clock += 1
        self.wakes_at_s = None
        return contributors
