"""Who takes part in an elastic job. Pure: events in, commands out; whoever calls has the clock and the processes.

A worker that `hvd.init()` or a reset has brought here waits for its place. Once all that take part wait, those whose
hosts still have room for them form the next membership. New workers start beside them, and they hear of it when these
wait. A worker that fails puts its host out, with all workers there, as Horovod has it.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, final

from paceline.errors import UsageError
from paceline.horovod.elastic_jobs.known_hosts import KnownHosts
from paceline.horovod.errors import FAILED, how_ended
from paceline.membership import Membership

REMOVED, ADDED = 1, 2
"""What members are told of hosts: bits, as Horovod's scripts know them."""


@final
@dataclass(frozen=True, kw_only=True)
class Policy:
    num_proc: int
    """Slots that are waited for at the start."""
    min_num_proc: int
    """How many workers are needed to go on."""
    max_num_proc: int | None = None
    elastic_timeout_s: float = 600.0
    """How long to wait for room for the fewest."""
    come_within_s: float = 600.0
    """How long a worker may take to come to those that wait for it. Some notice a failure only once their own wait's
    deadline has passed, so that this has to be longer."""
    reset_limit: int | None = None
    """Memberships after the first."""
    tells_early: bool = False
    """Whether members hear of new workers when these are started, and wait for them; else once these are there."""

    def __post_init__(self) -> None:
        """Raises UsageError for numbers that contradict one another."""
        most = self.max_num_proc
        if not self.min_num_proc <= self.num_proc or (most is not None and self.num_proc > most):
            shown = "" if most is None else f" and --max-num-proc {most}"
            raise UsageError(
                f"--min-num-proc {self.min_num_proc}, -np {self.num_proc}{shown} are to be given the smallest first"
            )


class Start(NamedTuple):
    worker: int
    host: str


class Stop(NamedTuple):
    worker: int


class Enter(NamedTuple):
    membership: Membership
    """Members are the workers' numbers, which say who is older."""
    workers: tuple[int, ...]
    """The same by rank, host by host."""
    hosts: tuple[str, ...]
    """Where they are."""
    joined: tuple[int, ...]
    """Those of them that are new, and have to be brought the state."""
    waited_s: float
    """How long the first of the others has waited for it."""
    failures: tuple[str, ...]
    """How workers of the membership before have failed."""

    @property
    def has_newcomers(self) -> bool:
        return bool(self.joined)


class Tell(NamedTuple):
    workers: tuple[int, ...]
    update: int


class Finish(NamedTuple):
    error: str | None


Command = Start | Stop | Enter | Tell | Finish


@dataclass(eq=False)
class _Worker:
    number: int
    host: str
    started_s: float
    epoch: int = 0
    """The last membership that it was of."""
    waits_since_s: float | None = None
    is_awaited: bool = False
    """Members wait for it, though it is new."""

    @property
    def waits(self) -> bool:
        return self.waits_since_s is not None


@final
class Driver:
    """Every event's commands are to be carried out in their order."""

    def __init__(self, policy: Policy, hosts: KnownHosts, *, now_s: float) -> None:
        self._policy, self._hosts = policy, hosts
        self._workers: dict[int, _Worker] = {}
        self._num_started = 0
        self._membership: Membership | None = None
        self._ranks: dict[int, int] = {}
        self._finished: Counter[str] = Counter()  # slots whose workers have done their work
        self._has_success = False
        self._failures: list[str] = []  # of this membership
        self._short_since_s: float | None = now_s  # since when there are too few slots
        self._told = 0
        self._planned: dict[str, int] | None = None  # what members were told of, and wait for
        self.is_over = False

    def found(self, slots: dict[str, int], now_s: float) -> list[Command]:
        """The hosts that there are now, and their slots."""
        self._hosts.find(slots)
        return self._decide(now_s)

    def asked(self, worker: int, now_s: float) -> list[Command]:
        """A worker waits for its place in the next membership."""
        if worker in self._workers:
            self._workers[worker].waits_since_s = now_s
        return self._decide(now_s)

    def ended(self, worker: int, status: int, now_s: float) -> list[Command]:
        """A worker's process has ended, with a signal's number below zero."""
        gone = self._workers.pop(worker, None)
        if gone is None:  # it was to
            return []
        if status == 0:
            self._finished[gone.host] += 1
            self._has_success |= gone.epoch == self._epoch
        else:
            self._fail(gone, how_ended(status), now_s)
        return self._decide(now_s)

    def ticked(self, now_s: float) -> list[Command]:
        """Time has passed."""
        return self._decide(now_s)

    @property
    def next_s(self) -> float | None:
        """When `ticked` has to be called at the latest."""
        short_s = None if self._short_since_s is None else self._short_since_s + self._policy.elastic_timeout_s
        others_s = (short_s, self._hosts.next_s)
        return min((*self._late_at().values(), *(each for each in others_s if each is not None)), default=None)

    # --- decisions ----------------------------------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        return 0 if self._membership is None else self._membership.epoch

    def _members(self) -> list[_Worker]:
        """Who takes part; at first who is to."""
        return [worker for worker in self._workers.values() if worker.epoch == self._epoch]

    def _decide(self, now_s: float) -> list[Command]:
        if self.is_over:
            return []
        self._hosts.revive(now_s)
        for worker, late_s in self._late_at().items():
            if late_s <= now_s:
                self._fail(worker, f"did not come within {self._policy.come_within_s:g} s where others wait", now_s)
        usable = self._shares()
        commands: list[Command] = [
            Stop(worker.number) for worker in self._workers.values()
            if worker.host not in usable and (self._hosts.is_out(worker.host) or worker.epoch != self._epoch)
        ]  # fmt: skip
        for command in commands:
            assert isinstance(command, Stop)
            del self._workers[command.worker]
        if self._has_success:
            if all(worker.waits for worker in self._members()):
                commands += self._finish(self._failure() if self._failures else None)
            return commands
        if self._num_started and not self._members():
            return [*commands, *self._finish(self._failure())]
        commands += self._start(usable, now_s)
        if self._is_due():
            return [*commands, *self._form(usable, now_s)]
        if self._num_started:  # there is room: somebody is still to come
            self._short_since_s = None
        return [*commands, *self._tell(usable)]

    def _shares(self) -> dict[str, int]:
        """How many workers each host is to have: the oldest hosts first."""
        if self._planned is not None:
            return {host: count for host, count in self._planned.items() if not self._hosts.is_out(host)}
        left = self._policy.max_num_proc
        if left is None:
            return self._hosts.usable
        found = {}
        for host, slots in self._hosts.usable.items():
            if left > 0:
                found[host] = min(slots, left)
                left -= found[host]
        return found

    def _start(self, usable: dict[str, int], now_s: float) -> list[Command]:
        if not self._num_started:
            if sum(usable.values()) < self._policy.num_proc:
                return self._wait(sum(usable.values()), self._policy.num_proc, now_s)
            self._short_since_s = None
        there = Counter(worker.host for worker in self._workers.values()) + self._finished
        started: list[Command] = []
        for host, count in usable.items():
            for _ in range(count - there[host]):
                self._num_started += 1
                worker = _Worker(self._num_started, host, now_s, is_awaited=self._policy.tells_early)
                self._workers[worker.number] = worker
                started.append(Start(worker.number, host))
        return started

    def _is_due(self) -> bool:
        """Everybody waits whom a membership cannot go without."""
        awaited = self._awaited()
        return bool(awaited) and all(worker.waits for worker in awaited)

    def _awaited(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.epoch == self._epoch or worker.is_awaited]

    def _late_at(self) -> dict[_Worker, float]:
        """When those have to have come for whom others wait."""
        awaited = self._awaited()
        first_s = min((worker.waits_since_s for worker in awaited if worker.waits_since_s is not None), default=None)
        if first_s is None or self._has_success:
            return {}
        limit_s = self._policy.come_within_s
        return {worker: max(first_s, worker.started_s) + limit_s for worker in awaited if not worker.waits}

    def _fail(self, worker: _Worker, how: str, now_s: float) -> None:
        """Its host goes out, and who is there with it."""
        rank = self._ranks.get(worker.number)
        self._failures.append(f"{'a new worker' if rank is None else f'rank {rank}'} on {worker.host} {how}")
        self._hosts.fail(worker.host, now_s)

    def _form(self, usable: dict[str, int], now_s: float) -> list[Command]:
        chosen = [worker for host, count in usable.items() for worker in self._waiting(host)[:count]]
        if len(chosen) < self._policy.min_num_proc:
            return self._wait(len(chosen), self._policy.min_num_proc, now_s)
        if not any(worker.epoch == self._epoch for worker in chosen):
            # Hosts that are to go may still be there: one stays until the others have the state.
            kept = [worker for worker in self._members() if worker.waits]
            if not kept:
                return self._finish("no worker of before is left, so that nobody has the job's state")
            chosen.insert(0, kept[0])
        limit = self._policy.reset_limit
        if limit is not None and self._epoch > limit:
            return self._finish(
                f"the job has changed its workers more often than the {limit} times of --reset-limit"
                + (f"; lastly since {self._failures[0]}" if self._failures else "")
            )
        numbers = sorted(worker.number for worker in chosen)
        self._membership = Membership(self._epoch + 1, tuple(numbers))
        first = {worker.host: min(each.number for each in chosen if each.host == worker.host) for worker in chosen}
        chosen.sort(key=lambda worker: (first[worker.host], worker.number))  # the oldest worker is the first rank
        self._ranks = {worker.number: rank for rank, worker in enumerate(chosen)}
        joined = tuple(worker.number for worker in chosen if worker.epoch == 0)
        since_s = [each.waits_since_s for each in chosen if each.epoch and each.waits_since_s is not None]
        waited_s = now_s - min(since_s, default=now_s)
        dropped = [worker.number for worker in self._workers.values() if worker.waits and worker not in chosen]
        for number in dropped:
            del self._workers[number]
        for worker in chosen:
            worker.epoch, worker.waits_since_s, worker.is_awaited = self._epoch, None, False
        failures = tuple(self._failures)
        self._failures, self._told, self._planned, self._short_since_s = [], 0, None, None
        entering = Enter(
            self._membership,
            tuple(worker.number for worker in chosen),
            tuple(worker.host for worker in chosen),
            joined,
            waited_s,
            failures,
        )
        return [*map(Stop, dropped), entering]

    def _waiting(self, host: str) -> list[_Worker]:
        """The oldest first."""
        return [worker for worker in self._workers.values() if worker.host == host and worker.waits]

    def _tell(self, usable: dict[str, int]) -> list[Command]:
        """Members that go on hear once of who is to leave, and of who has come."""
        if not self._epoch:
            return []
        members = self._members()
        there = Counter(worker.host for worker in members)
        some_stay = any(host in usable for host in there)
        update = REMOVED if some_stay and any(count > usable.get(host, 0) for host, count in there.items()) else 0
        for worker in self._workers.values():
            is_there = worker.waits or worker.is_awaited
            if worker.epoch != self._epoch and is_there and there[worker.host] < usable.get(worker.host, 0):
                update |= ADDED
        update &= ~self._told
        self._told |= update
        if update and self._policy.tells_early:
            self._planned = usable
        return [Tell(tuple(worker.number for worker in members if not worker.waits), update)] if update else []

    def _wait(self, count: int, wanted: int, now_s: float) -> list[Command]:
        if self._short_since_s is None:
            self._short_since_s = now_s
        waited_s = now_s - self._short_since_s
        if waited_s < self._policy.elastic_timeout_s:
            return []
        cause = f". {self._failure()}" if self._failures else ""
        return self._finish(
            f"for {self._policy.elastic_timeout_s:g} s there was room for {count} of at least {wanted} workers "
            f"(--elastic-timeout){cause}"
        )

    def _failure(self) -> str:
        return f"{FAILED}: first {self._failures[0]}" if self._failures else "all workers are gone"

    def _finish(self, error: str | None) -> list[Command]:
        self.is_over = True
        return [Finish(error)]
