"""BSP: all workers make an update together."""

from collections.abc import Iterable, Mapping
from typing import final

from paceline.membership import Membership
from paceline.server.admission.following import Following
from paceline.server.admission.rule import AdmissionRule, ProtocolError


@final
class BulkSynchronous(AdmissionRule):
    """BSP: one update a clock, the mean of all workers' gradients (Valiant 1990; Li et al., OSDI 2014, section 3.5).

    With `backup_workers` b, the first n - b gradients of a clock count and later ones are dropped (Chen et al.,
    "Revisiting Distributed Synchronous SGD", 2016, section 3.1). The first worker to leave then ends the run for all.
    It has stepped as often as every worker would without backup workers, each time for another clock. Others made up
    for the batches that slower workers have left.

    The same holds at a place where all workers meet: the first to come there ends updates until all have come. What
    slower ones compute on their way there is dropped, and lets them go on at once.
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
        self._aside: set[int] = set()
        self._begins: dict[int, int] = {}  # by worker that has joined for a clock to come: that clock
        self._num_missing = members.size  # active workers that are not held, of those that the open clock needs

    def resume(self, clocks: Mapping[int, int]) -> None:
        self._clock = max(clocks.values())
        self._open()

    @property
    def begins(self) -> Mapping[int, int]:
        return self._begins

    def admit(self, active: Iterable[int], begins: Mapping[int, int]) -> None:
        super().admit(active, begins)
        self._begins = dict(begins)

    def for_another_shard(self) -> AdmissionRule:
        return Following(self.members) if self._backup_workers else BulkSynchronous(self.members)

    def push(self, sender: int, clock: int) -> tuple[int, ...]:
        self.require_active(sender)
        if clock > self._clock or sender in self._held:
            raise ProtocolError(f"worker {sender} pushed for clock {clock} while clock {self._clock} is open")
        if clock < self._clock or self.is_over or self._aside:
            return ()
        self._held.add(sender)
        self._num_missing -= 1
        return self._close_if_full()

    def is_held(self, sender: int) -> bool:
        return sender in self._held

    def is_admitted(self, worker: int) -> bool:
        return worker not in self._held and worker not in self._begins

    def clock_of(self, worker: int) -> int:
        return self._clock

    def join(self, worker: int) -> None:
        self.add(worker)
        self._num_missing += worker not in self._held

    def begin_with(self, worker: int, clock: int) -> tuple[int, ...]:
        if clock <= self._clock or worker in self._begins:
            return ()
        self._begins[worker] = clock
        self._num_missing -= 1
        return self._close_if_full()

    def leave(self, worker: int) -> tuple[int, ...]:
        if worker not in self.active:
            return ()
        self.active.discard(worker)
        self._num_missing -= worker not in self._held and worker not in self._begins
        self._begins.pop(worker, None)
        contributors = self._close_if_full()
        if self._backup_workers:
            self.is_over = True
            self._held.clear()
        return contributors

    def step_aside(self, worker: int) -> tuple[int, ...]:
        self.require_active(worker)
        if self._backup_workers:
            self._aside.add(worker)
            self._held.clear()
            self._num_missing = len(self.active) - len(self._begins)
        return ()

    def come_back(self, worker: int) -> None:
        self.require_active(worker)
        self._aside.discard(worker)

    def _close_if_full(self) -> tuple[int, ...]:
        # A worker that left after its push still counts: its gradient is here.
        if not self._held or self._num_missing > self._backup_workers:
            return ()
        contributors = tuple(sorted(self._held))
        if self._backup_workers:
            self.contributors = contributors
        self._clock += 1
        self._open()
        return contributors

    def _open(self) -> None:
        """A clock, for which nothing has come yet."""
        self._held.clear()
        if self._begins:
            self._begins = {worker: clock for worker, clock in self._begins.items() if clock > self._clock}
        self._num_missing = len(self.active) - len(self._begins)
