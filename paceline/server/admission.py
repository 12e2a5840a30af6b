"""Admission rules: which gradients form an update, and which worker may go on.

Each rule is told what arrives and answers what to do; it holds no tensor, no clock and no socket, so that real
servers and simulated ones share it.

A model is held by many shards, each with a rule of its own. Where a rule's decisions follow from which gradients come,
in whatever order (BSP), or need not agree (SSP, ASP), each shard decides for itself. With backup workers the order of
arrival decides, and links differ: one shard decides, and the rules of the others are told (`Following`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from typing import final

from paceline.errors import PacelineError


class ProtocolError(PacelineError):
    """A worker said something that its clock does not allow."""


class AdmissionRule(ABC):
    """Decides over the gradients and the clocks of `num_workers` workers."""

    def __init__(self, *, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        self.num_workers = num_workers
        self.active = set(range(num_workers))
        self.is_over = False
        """No further update will be formed: every worker is to end."""
        self.torn_reads = False
        """A worker on the server's host may read parameters while an update is being made."""
        self.needs_all = False
        """An update is made of every active worker's gradient, and each shard finds for itself when they have come."""

    @abstractmethod
    def for_another_shard(self) -> AdmissionRule:
        """A fresh rule for another shard of the same model."""

    @property
    @abstractmethod
    def contributors(self) -> tuple[int, ...] | None:
        """Whose gradients formed the last clock, if the rules of other shards must be told; none if they find it."""

    @abstractmethod
    def push(self, worker: int, clock: int) -> tuple[int, ...]:
        """A gradient for `clock` arrived. Returns the workers whose pushed gradients now form one update (their mean).

        Empty: keep this one until its clock is full, or drop it if `is_held(worker)` is false.

        Raises:
            ProtocolError: the worker has left or never was, or is not at this clock.
        """

    @abstractmethod
    def is_held(self, worker: int) -> bool:
        """Whether the worker's last gradient waits for others to complete its clock."""

    @abstractmethod
    def is_admitted(self, worker: int) -> bool:
        """Whether the worker may take the parameters and compute its next gradient."""

    @abstractmethod
    def clock_of(self, worker: int) -> int:
        """The clock the worker's next gradient belongs to."""

    @abstractmethod
    def leave(self, worker: int) -> tuple[int, ...]:
        """The worker pushes no more. Returns the workers whose held gradients now form an update, if any do."""

    @final
    def require_active(self, worker: int) -> None:
        """
        Raises:
            ProtocolError: the worker has left or never was.
        """
        if worker not in self.active:
            raise ProtocolError(f"worker {worker} is none of the active workers {sorted(self.active)}")


@final
class BulkSynchronous(AdmissionRule):
    """BSP: one update a clock, the mean of all workers' gradients (Valiant 1990; Li et al., OSDI 2014, section 3.5).

    With `backup_workers` b, the first n - b gradients of a clock count and later ones are dropped
    (Chen et al., "Revisiting Distributed Synchronous SGD", 2016, section 3.1). The first worker to leave then ends the
    run for all: it has stepped as often as every worker would without backup workers, each time for another clock, and
    what slower ones have left are the batches that others made up for.
    """

    def __init__(self, *, num_workers: int, backup_workers: int = 0) -> None:
        super().__init__(num_workers=num_workers)
        if not 0 <= backup_workers < num_workers:
            raise ValueError(f"backup_workers must be in 0..{num_workers - 1}, not {backup_workers}")
        self._backup_workers = backup_workers
        self.needs_all = not backup_workers
        self._clock = 0
        self._held: set[int] = set()
        self._num_missing = num_workers  # active workers that are not held
        self._contributors: tuple[int, ...] = ()

    def for_another_shard(self) -> AdmissionRule:
        if self._backup_workers:
            return Following(num_workers=self.num_workers)
        return BulkSynchronous(num_workers=self.num_workers)

    @property
    def contributors(self) -> tuple[int, ...] | None:
        return self._contributors if self._backup_workers else None

    def push(self, worker: int, clock: int) -> tuple[int, ...]:
        self.require_active(worker)
        if clock > self._clock or worker in self._held:
            raise ProtocolError(f"worker {worker} pushed for clock {clock} while clock {self._clock} is open")
        if clock < self._clock or self.is_over:
            return ()
        self._held.add(worker)
        self._num_missing -= 1
        return self._close_if_full()

    def is_held(self, worker: int) -> bool:
        return worker in self._held

    def is_admitted(self, worker: int) -> bool:
        return worker not in self._held

    def clock_of(self, worker: int) -> int:
        return self._clock

    def leave(self, worker: int) -> tuple[int, ...]:
        if worker not in self.active:
            return ()
        self.active.discard(worker)
        self._num_missing -= worker not in self._held
        contributors = self._close_if_full()
        if self._backup_workers:
            self.is_over = True
            self._held.clear()
        return contributors

    def _close_if_full(self) -> tuple[int, ...]:
        # A worker that left after its push still counts: its gradient is here.
        if not self._held or self._num_missing > self._backup_workers:
            return ()
        self._contributors = tuple(sorted(self._held))
        self._held.clear()
        self._num_missing = len(self.active)
        self._clock += 1
        return self._contributors


@final
class Following(AdmissionRule):
    """BSP with backup workers at every shard but one: that one decides whose gradients count, and workers say so here.

    A worker pushes to all shards; once the deciding one has let it go on at some clock, it tells the others (`follow`),
    which let it go on when they have come to that clock too. So a gradient that counts was computed from parameters
    that are everywhere those of its clock. Any one contributor's word is enough to decide a clock here.
    """

    def __init__(self, *, num_workers: int) -> None:
        super().__init__(num_workers=num_workers)
        self._clock = 0
        self._contributors: tuple[int, ...] = ()
        self._pushed: set[int] = set()
        self._goes_on_at: dict[int, float] = {}
        self._pushed_at: dict[int, int] = {}

    def for_another_shard(self) -> AdmissionRule:
        return Following(num_workers=self.num_workers)

    @property
    def contributors(self) -> tuple[int, ...] | None:
        return None

    def push(self, worker: int, clock: int) -> tuple[int, ...]:
        self.require_active(worker)
        if clock > self._clock or self._goes_on_at.get(worker, 0) > self._clock:
            raise ProtocolError(f"worker {worker} pushed for clock {clock} while clock {self._clock} is open")
        self._goes_on_at[worker] = math.inf
        self._pushed_at[worker] = clock
        if clock < self._clock:
            return ()
        self._pushed.add(worker)
        return self._close_if_decided()

    def follow(self, worker: int, clock: int, contributors: tuple[int, ...]) -> tuple[int, ...]:
        """The worker goes on at `clock`, and the gradients of `contributors` formed the clock before that.

        Returns the workers whose pushed gradients now form one update, if any do.

        Raises:
            ProtocolError: the worker has not pushed since it was last let go on, or nobody can have decided so.
        """
        self.require_active(worker)
        if self._goes_on_at.get(worker) != math.inf:
            raise ProtocolError(f"worker {worker} goes on at clock {clock} without a push here")
        is_clock = type(clock) is int and clock >= self._pushed_at[worker]
        if not is_clock or not self._are_workers(contributors) or len(set(contributors)) < len(contributors):
            raise ProtocolError(f"worker {worker} cannot go on at clock {clock!r} after gradients of {contributors!r}")
        self._goes_on_at[worker] = clock
        if clock - 1 == self._clock:
            self._contributors = contributors
        return self._close_if_decided()

    def is_held(self, worker: int) -> bool:
        return self._goes_on_at.get(worker, 0) > self._clock

    def is_admitted(self, worker: int) -> bool:
        return not self.is_held(worker)

    def clock_of(self, worker: int) -> int:
        return self._clock

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        return ()

    def _are_workers(self, numbers: tuple[int, ...]) -> bool:
        return all(type(number) is int and 0 <= number < self.num_workers for number in numbers)

    def _close_if_decided(self) -> tuple[int, ...]:
        contributors = self._contributors
        if not contributors or not self._pushed.issuperset(contributors):
            return ()
        self._contributors = ()
        self._pushed.clear()
        self._clock += 1
        return contributors


@final
class StaleSynchronous(AdmissionRule):
    """SSP: gradients are applied on arrival; a worker runs at most `staleness` clocks ahead of the slowest.

    Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
    With infinite staleness nobody ever waits: ASP (Hogwild!-style asynchrony over a server; Dean et al. 2012).
    """

    def __init__(self, *, num_workers: int, staleness: float = math.inf, torn_reads: bool = False) -> None:
        super().__init__(num_workers=num_workers)
        if not staleness >= 0:
            raise ValueError(f"staleness must be at least 0, not {staleness}")
        self._staleness = staleness
        self.torn_reads = torn_reads
        self._clocks = [0] * num_workers
        self._num_at = Counter({0: num_workers})  # active workers, by their clocks
        self._slowest = 0

    def for_another_shard(self) -> AdmissionRule:
        return StaleSynchronous(num_workers=self.num_workers, staleness=self._staleness, torn_reads=self.torn_reads)

    @property
    def contributors(self) -> tuple[int, ...] | None:
        return None

    def push(self, worker: int, clock: int) -> tuple[int, ...]:
        self.require_active(worker)
        if clock != self._clocks[worker]:
            raise ProtocolError(f"worker {worker} pushed for clock {clock}, but is at {self._clocks[worker]}")
        if not self.is_admitted(worker):
            raise ProtocolError(f"worker {worker} pushed for clock {clock} without having been admitted to it")
        self._clocks[worker] += 1
        self._num_at[clock + 1] += 1
        self._take_from(clock)
        return (worker,)

    def is_held(self, worker: int) -> bool:
        return False

    def is_admitted(self, worker: int) -> bool:
        return not self.active or self._clocks[worker] - self._slowest <= self._staleness

    def clock_of(self, worker: int) -> int:
        return self._clocks[worker]

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
