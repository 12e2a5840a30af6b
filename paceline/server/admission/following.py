"""The rule of a shard that is told what another one has decided."""

import math
from typing import final

from paceline.membership import Membership
from paceline.server.admission.rule import AdmissionRule, Decisions, ProtocolError


@final
class Following(AdmissionRule):
    """The rule of every shard but the one that decides whose contributions count: workers say here what it decided.

    A worker pushes to all shards. Once the deciding one has let it go on at some clock, the worker tells the others
    (`follow`), which let it go on when they have come to that clock, too. So a gradient that counts was computed from
    parameters that are everywhere those of its clock. Any one contributor's word is enough to decide a clock here.
    Where workers die, what the deciding shard has decided comes another way, too (`learn`).

    Args:
        takes_late: a contribution that came too late for its clock counts in a later one, rather than not at all.
            Clocks may then be decided while contributions to an earlier one are still on their way here. When nobody is
            left who could say more, what nothing is decided of forms one.
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
        if clock == self._pushed_at[worker]:  # there, what it pushed counts for nothing
            self._pushed.discard(worker)
        return self.learn({clock - 1: contributors})

    def learn(self, decided: Decisions) -> tuple[int, ...]:
        new = {clock: senders for clock, senders in decided.items() if senders and clock >= self._clock}
        self._decided.update(new)
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

    def begin_with(self, worker: int, clock: int) -> tuple[int, ...]:
        self._goes_on_at[worker] = clock
        return self._of_the_gone()

    def leave(self, worker: int) -> tuple[int, ...]:
        self.active.discard(worker)
        return self._of_the_gone()

    def _of_the_gone(self) -> tuple[int, ...]:
        """What waits here for somebody who is there, once nobody can say what has become of it elsewhere: all that are
        there, as those who have just joined, are to go on at a later clock."""
        may_say = any(not self._clock < self._goes_on_at.get(worker, 0) < math.inf for worker in self.active)
        if may_say or not self._takes_late or not self._pushed or self._clock in self._decided:
            return ()
        contributors = tuple(sorted(self._pushed))
        self._pushed.clear()
        self._clock += 1
        return contributors

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
