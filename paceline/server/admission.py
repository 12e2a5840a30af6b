"""Admission rules: which contributions form an update, and which worker may go on.

Each rule is told what arrives, and how late it is, and answers what to do; it holds no tensor, no clock and no socket,
so that real servers and simulated ones share it.

A model is held by many shards, each with a rule of its own. Where a rule's decisions follow from which contributions
come, in whatever order (BSP), or need not agree (SSP, ASP), each shard decides for itself. With backup workers, or a
quorum, the order of arrival decides, and links differ: one shard decides, and the rules of the others are told
(`Following`).
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar, final

from paceline.errors import PacelineError
from paceline.membership import Membership


class ProtocolError(PacelineError):
    """A worker said something that its clock does not allow."""


class AdmissionRule(ABC):
    """Decides over the contributions of senders and the clocks of workers.

    Most often each worker is a sender. Where a worker plays several, one after the other, it is a worker that waits for
    an answer, and a sender's contribution that waits for its update.

    Args:
        members: the workers that take part at first.
    """

    joins: ClassVar[bool] = True
    """An update may be made of several contributions."""
    torn_reads: bool = False
    """A worker on the server's host may read parameters while an update is being made."""
    needs_all: bool = False
    """An update is made of every active worker's gradient, and each shard finds for itself when they have come."""
    is_over: bool = False
    """No further update will be formed: every worker is to end."""
    follows: bool = False
    """Another shard decides, and each push must be followed by `follow`, with what it decided."""
    is_plain: bool = False
    """While nothing is held and all take part, the workers' clocks are all the rule's state."""
    contributors: tuple[int, ...] | None = None
    """Who formed the last clock, if the rules of other shards must be told; none if they find it themselves."""
    is_timed: bool = False
    """What time it is matters."""
    wakes_at_s: float | None = None
    """When `tick` is to be called, if nothing arrives before; by the clock that it is told."""

    def __init__(self, members: Membership) -> None:
        self.members = members
        self.active = set(members.ranks)

    def begin_at(self, iteration: int) -> None:
        """The first clock follows so many updates, which were made before a checkpoint."""

    def resume(self, clocks: Mapping[int, int]) -> None:
        """Others have gone on for a rule that holds nothing: where each worker is now."""
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def for_another_shard(self) -> "AdmissionRule":
        """A fresh rule for another shard of the same model."""

    def worker_of(self, sender: int) -> int:
        """Who pushes for this sender; also of one that never was."""
        return sender

    @abstractmethod
    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        """A contribution for `clock` arrived. Returns the senders whose contributions now form one update.

        Empty: keep this one until its clock is full, or drop it if `is_held(sender)` is false. Where a worker goes on
        while contributions that it pushed are held, those of one clock must end in one update.

        Raises:
            ProtocolError: the sender has left or never was, or is not at this clock.
        """

    def expect_pause(self, num_updates: int) -> None:
        """All workers are to meet after so many further updates. Told before each `push`."""

    def due(self) -> tuple[int, ...]:
        """The senders whose contributions form one more update, now that the last one is made; empty: none do yet."""
        return ()

    def tick(self, now_s: float) -> tuple[int, ...]:
        """It is that late. Told, if the rule is timed, after whatever has arrived, and at `wakes_at_s`. Returns the
        senders whose held contributions now form an update, if any do."""
        return ()

    def follow(self, worker: int, clock: int, contributors: tuple[int, ...]) -> tuple[int, ...]:
        """The deciding shard let the worker go on at `clock`, and `contributors` formed the clock before that.

        Returns the senders whose contributions now form one update, if any do.

        Raises:
            ProtocolError: this rule decides for itself, the worker has not pushed since it was last let go on, or
                nobody can have decided so.
        """
        raise ProtocolError(f"worker {worker} brings a decision to a shard that decides for itself")

    @abstractmethod
    def is_held(self, sender: int) -> bool:
        """Whether the sender's last contribution waits for others to complete its clock."""

    @abstractmethod
    def is_admitted(self, worker: int) -> bool:
        """Whether the worker may take the parameters and compute its next contribution."""

    @abstractmethod
    def clock_of(self, worker: int) -> int:
        """The clock the worker's next contribution belongs to."""

    @property
    def complete(self) -> int:
        """All that is contributed to the clocks before this one has been applied; 0: nobody knows."""
        return 0

    @abstractmethod
    def join(self, worker: int) -> None:
        """The worker takes part from the present clock on. Called where every shard has heard the same so far.
        Raises ProtocolError if it takes part already."""

    @abstractmethod
    def leave(self, worker: int) -> tuple[int, ...]:
        """The worker pushes no more. Returns the senders whose held contributions now form an update, if any do."""

    @final
    def require_active(self, worker: int) -> None:
        """Raises ProtocolError if the worker has left or never was."""
        if worker not in self.active:
            raise ProtocolError(f"worker {worker} is none of the active workers {sorted(self.active)}")

    @final
    def add(self, worker: int) -> None:
        """It is active from here on. Raises ProtocolError if it takes part already."""
        if worker in self.active:
            raise ProtocolError(f"worker {worker} takes part already")
        self.active.add(worker)


@final
class BulkSynchronous(AdmissionRule):
    """BSP: one update a clock, the mean of all workers' gradients (Valiant 1990; Li et al., OSDI 2014, section 3.5).

    With `backup_workers` b, the first n - b gradients of a clock count and later ones are dropped
    (Chen et al., "Revisiting Distributed Synchronous SGD", 2016, section 3.1). The first worker to leave then ends the
    run for all: it has stepped as often as every worker would without backup workers, each time for another clock, and
    what slower ones have left are the batches that others made up for.
    """

    def __init__(self, members: Membership, *, backup_workers: int = 0) -> None:
        super().__init__(members)
        if not 0 <= backup_workers < members.size:
            raise ValueError(f"backup_workers must be in 0..{members.size - 1}, not {backup_workers}")
        self._backup_workers = backup_workers
        self.needs_all = self.is_plain = not backup_workers
        self.contributors = () if backup_workers else None
        self._clock = 0
        self._held: set[int] = set()
        self._num_missing = members.size  # active workers that are not held

    def resume(self, clocks: Mapping[int, int]) -> None:
        self._clock = max(clocks.values())

    def for_another_shard(self) -> AdmissionRule:
        return Following(self.members) if self._backup_workers else BulkSynchronous(self.members)

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        self.require_active(sender)
        if clock > self._clock or sender in self._held:
            raise ProtocolError(f"worker {sender} pushed for clock {clock} while clock {self._clock} is open")
        if clock < self._clock or self.is_over:
            return ()
        self._held.add(sender)
        self._num_missing -= 1
        return self._close_if_full()

    def is_held(self, sender: int) -> bool:
        return sender in self._held

    def is_admitted(self, worker: int) -> bool:
        return worker not in self._held

    def clock_of(self, worker: int) -> int:
        return self._clock

    def join(self, worker: int) -> None:
        self.add(worker)
        self._num_missing += worker not in self._held

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
        contributors = tuple(sorted(self._held))
        if self._backup_workers:
            self.contributors = contributors
        self._held.clear()
        self._num_missing = len(self.active)
        self._clock += 1
        return contributors


@final
class Quorum(AdmissionRule):
    """Asynchronous rounds: one update of the first `quorum` contributions, and of those that come in the grace after.

    Nobody waits for slower workers, and nothing that they computed is lost: what comes later counts in the round that
    is open then (Liu et al., "Asynchronous local-SGD training for language modeling", 2024, section 2, whose quorum is
    one). After the last round before a pause all workers meet anyway. So this round is of everybody, and in a pause no
    contribution is held.

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

    def for_another_shard(self) -> AdmissionRule:
        return Following(self.members, takes_late=True)

    def expect_pause(self, num_updates: int) -> None:
        self._meets_at = self._clock + num_updates

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        self.require_active(sender)
        if clock > self._clock or sender in self._held:
            raise ProtocolError(f"worker {sender} pushed for clock {clock} while clock {self._clock} is open")
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
        return self._clock

    def join(self, worker: int) -> None:
        self.add(worker)

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        return self._close() if self._is_full(waits=self.is_timed) else ()

    def _is_full(self, *, waits: bool) -> bool:
        """Whether a round can be made; `waits`: of everybody's contributions alone."""
        # A worker that left after its push still counts: its contribution is here.
        if waits or self._clock + 1 >= self._meets_at:
            return bool(self._held) and self._held >= self.active
        return len(self._held) >= max(1, min(self._quorum, len(self.active | self._held)))

    def _close(self) -> tuple[int, ...]:
        contributors = self.contributors = tuple(sorted(self._held))
        self._held.clear()
        self._clock += 1
        self.wakes_at_s = None
        return contributors


@final
class Following(AdmissionRule):
    """The rule of every shard but the one that decides whose contributions count: workers say here what it decided.

    A worker pushes to all shards; once the deciding one has let it go on at some clock, it tells the others (`follow`),
    which let it go on when they have come to that clock too. So a gradient that counts was computed from parameters
    that are everywhere those of its clock. Any one contributor's word is enough to decide a clock here.

    Args:
        takes_late: a contribution that came too late for its clock counts in a later one, rather than not at all.
            Clocks may then be decided while contributions to an earlier one are still on their way here.
    """

    follows = True

    def __init__(self, members: Membership, *, takes_late: bool = False) -> None:
        super().__init__(members)
        self._takes_late = takes_late
        self._clock = 0
        self._decided: dict[int, tuple[int, ...]] = {}
        """By clock: who formed it."""
        self._known = set(members.ranks)
        self._pushed: set[int] = set()
        self._goes_on_at: dict[int, float] = {}
        self._pushed_at: dict[int, int] = {}

    def for_another_shard(self) -> AdmissionRule:
        return Following(self.members, takes_late=self._takes_late)

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        self.require_active(sender)
        if clock > self._clock or self._goes_on_at.get(sender, 0) > self._clock:
            raise ProtocolError(f"worker {sender} pushed for clock {clock} while clock {self._clock} is open")
        self._goes_on_at[sender] = math.inf
        self._pushed_at[sender] = clock
        if clock < self._clock and not self._takes_late:
            return ()
        self._pushed.add(sender)
        return self.due()

    def follow(self, worker: int, clock: int, contributors: tuple[int, ...]) -> tuple[int, ...]:
        self.require_active(worker)
        if self._goes_on_at.get(worker) != math.inf:
            raise ProtocolError(f"worker {worker} goes on at clock {clock} without a push here")
        is_clock = type(clock) is int and clock >= self._pushed_at[worker]
        are_workers = all(type(each) is int and each in self._known for each in contributors)
        if not is_clock or not are_workers or len(set(contributors)) < len(contributors):
            raise ProtocolError(f"worker {worker} cannot go on at clock {clock!r} after gradients of {contributors!r}")
        self._goes_on_at[worker] = clock
        if contributors and clock > self._clock:
            self._decided[clock - 1] = contributors
        return self.due()

    def is_held(self, sender: int) -> bool:
        return self._goes_on_at.get(sender, 0) > self._clock

    def is_admitted(self, worker: int) -> bool:
        return not self.is_held(worker)

    def clock_of(self, worker: int) -> int:
        return self._clock

    def join(self, worker: int) -> None:
        self.add(worker)
        self._known.add(worker)

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        return ()

    def due(self) -> tuple[int, ...]:
        contributors = self._decided.get(self._clock, ())
        if not contributors or not self._pushed.issuperset(contributors):
            return ()
        del self._decided[self._clock]
        if self._takes_late:
            self._pushed.difference_update(contributors)
        else:
            self._pushed.clear()
        self._clock += 1
        return contributors


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
        # With a bound, workers wait for others at any step, and the server would take its shard back as often.
        self.torn_reads, self.is_plain = torn_reads, staleness == math.inf and not torn_reads
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
        """Beside the slowest: it has missed what these have done."""
        self.add(worker)
        self._clocks[worker] = self._slowest
        self._num_at[self._slowest] += 1

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
