"""What every admission rule answers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, final

from paceline.errors import PacelineError
from paceline.membership import Membership

Decisions = Mapping[int, tuple[int, ...]]
"""By clock: whose contributions formed it."""


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
    is_free: bool = False
    """Each contribution is an update of its own when it comes, and nobody waits for another's."""
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

    @property
    def begins(self) -> Mapping[int, int]:
        """Of workers that have joined for a clock to come, that clock."""
        return {}

    def admit(self, active: Iterable[int], begins: Mapping[int, int]) -> None:
        """These take part, as a rule has said that holds nothing; `resume` follows."""
        self.active = set(active)

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

    @property
    def decided(self) -> Decisions:
        """What this rule has decided for other shards, as far as one of these may not have been told."""
        return {}

    def learn(self, decided: Decisions) -> tuple[int, ...]:
        """The deciding shard has decided so; whoever was to say it here may be gone. Returns the senders whose
        contributions now form one update, if any do."""
        return ()

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

    def join(self, worker: int) -> None:
        """The worker takes part from the present clock on. Raises ProtocolError if it takes part already."""
        raise NotImplementedError(type(self).__name__)

    def begin_with(self, worker: int, clock: int) -> tuple[int, ...]:
        """The worker has joined and pushed nothing yet. It is to push for this clock first: the latest at which a
        shard, on whatever server, had it join. Returns the senders whose held contributions now form an update, which
        no longer waits for this worker, if any do."""
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def leave(self, worker: int) -> tuple[int, ...]:
        """The worker pushes no more. Returns the senders whose held contributions now form an update, if any do."""

    def step_aside(self, worker: int) -> tuple[int, ...]:
        """The worker waits for all others at a place of their scripts: no contribution of it is held, and it gives none
        before it comes back. Returns the senders whose held contributions now form an update, if any do. By default
        the others wait for it as before.

        Raises:
            ProtocolError: the worker has left or never was.
        """
        self.require_active(worker)
        return ()

    def come_back(self, worker: int) -> None:
        """The worker goes on; called once all are at the place. Raises ProtocolError as `step_aside`."""
        self.require_active(worker)

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
