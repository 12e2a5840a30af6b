"""Carries out what `driver.py` decides: has the clock, and looks at the hosts. Whoever has the workers is a `Fleet`."""

import contextlib
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from paceline.errors import PacelineError, RunFailed
from paceline.horovod.elastic_jobs.discovery import Discover
from paceline.horovod.elastic_jobs.driver import Command, Driver, Enter, Finish, Policy, Start, Stop, Tell
from paceline.horovod.elastic_jobs.known_hosts import Cooldown, KnownHosts
from paceline.horovod.hosts import places
from paceline.records import EventRecord

LOOK_EVERY_S = 1.0
_LONGEST_WAIT_S = 3600.0


class Fleet(Protocol):
    """Workers by their numbers. It says to the loop when one has asked for a place, and when one has ended."""

    def start(self, worker: int, host: str) -> None:
        """Start a worker on the host."""

    def stop(self, worker: int) -> None:
        """Have a worker end; what it still says does not count."""

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        """Send a worker what its `Line` hears."""

    def note(self, event: EventRecord) -> None:
        """Keep this beside the workers' records, if those are kept."""


@final
class Loop:
    """Args:
    discover: is asked for hosts again and again. What it raises the first time ends the job.
    cooldown: none: a host whose worker has failed gets no other.
    look_every_s: from one look at the hosts to the next.
    """

    def __init__(
        self, fleet: Fleet, discover: Discover, *, policy: Policy, cooldown: Cooldown | None, look_every_s: float
    ) -> None:
        self._fleet, self._discover, self._look_every_s = fleet, discover, look_every_s
        self._driver = Driver(policy, KnownHosts(cooldown, random.random), now_s=time.monotonic())
        self._events: queue.Queue[Callable[[], list[Command]]] = queue.Queue()
        self._is_over = threading.Event()
        self._about: dict[int, dict[str, Any]] = {}  # what waiting workers say of themselves
        self._epoch = 0
        self.ranks: dict[int, int] = {}
        """The ranks of the last membership's workers, in their order."""

    def run(self) -> None:
        """Return once a worker has done its work, and the others have ended or wait for the next membership.

        Raises:
            RunFailed: nobody can go on; the message says why.
            UsageError: the hosts cannot be told.
        """
        self._act(self._driver.found(self._discover(), time.monotonic()))
        threading.Thread(target=self._look, name="paceline hosts", daemon=True).start()
        try:
            while not self._driver.is_over:
                self._act(self._next()())
        finally:
            self._is_over.set()

    def asked(self, worker: int, mine: dict[str, Any]) -> None:
        """A worker waits for a place; from any thread."""
        self._about[worker] = mine
        self._events.put(lambda: self._driver.asked(worker, time.monotonic()))

    def ended(self, worker: int, status: int) -> None:
        """A worker has ended; from any thread."""
        self._events.put(lambda: self._driver.ended(worker, status, time.monotonic()))

    def _next(self) -> Callable[[], list[Command]]:
        due_s = self._driver.next_s
        wait_s = _LONGEST_WAIT_S if due_s is None else max(0.0, due_s - time.monotonic())
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=wait_s)
        return lambda: self._driver.ticked(time.monotonic())

    def _look(self) -> None:
        warned = ""
        while not self._is_over.wait(self._look_every_s):
            try:
                found = self._discover()
            except PacelineError as error:  # as long as it lasts, hosts are taken to be what they were
                if str(error) != warned:
                    print(f"the hosts cannot be told: {error}", file=sys.stderr)
                warned = str(error)
                continue
            self._events.put(lambda found=found: self._driver.found(found, time.monotonic()))  # type: ignore[misc]

    def _act(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start(worker, host):
                    self._fleet.start(worker, host)
                case Stop(worker):
                    self._fleet.stop(worker)
                case Enter():
                    self._enter(command)
                case Tell(workers, update):
                    message = {"kind": "update", "epoch": self._epoch, "timestamp": time.monotonic(), "update": update}
                    for worker in workers:
                        self._fleet.tell(worker, message)
                case Finish(error) if error is not None:
                    raise RunFailed(error)

    def _enter(self, entering: Enter) -> None:
        self._epoch = entering.membership.epoch
        self.ranks = {worker: rank for rank, worker in enumerate(entering.workers)}
        members = [self._about.pop(worker) for worker in entering.workers]
        if self._epoch > 1:
            print(_in_words(entering), file=sys.stderr)
            self._fleet.note(_reformed(entering, members))
        about = {"epoch": self._epoch, "has_newcomers": entering.has_newcomers, "members": members}
        for worker, place in zip(entering.workers, places(entering.hosts), strict=True):
            self._fleet.tell(worker, {"kind": "enter", "place": place, **about})


def _in_words(entering: Enter) -> str:
    number, new = len(entering.workers), len(entering.joined)
    members = "1 worker" if number == 1 else f"{number} workers"
    newcomers = f", of whom {new} {'is' if new == 1 else 'are'} new" if new else ""
    return "; ".join((*entering.failures, f"the job goes on with {members}{newcomers}"))


def _reformed(entering: Enter, members: Sequence[Mapping[str, Any]]) -> EventRecord:
    """A change of the membership: workers by rank, called by their numbers in records, which begin with 0.

    Args:
        members: what they say of themselves.
    """
    iteration, time_s = max(each["standing"] for each in members)
    details = {
        "epoch": entering.membership.epoch,
        "ranks": [worker - 1 for worker in entering.workers],
        "joined": [worker - 1 for worker in entering.joined],
        "hosts": list(entering.hosts),
        "took_s": entering.waited_s,
    }
    return EventRecord("reformed", "run", iteration, time_s, details)
