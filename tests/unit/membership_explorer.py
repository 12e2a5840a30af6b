"""Every order of events that the membership protocol can meet, for a few workers, steps and failures.

A world is a value: members, coordinator, what lies in shared memory, and words under way. Rules can be left out, one at
a time, to see what each is there for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from paceline.elastic import Coordinator, Form, Member, Report, StaleEpoch
from paceline.errors import RunFailed
from paceline.membership import Membership

Contributors = frozenset[int]
Log = tuple[tuple[int, Contributors], ...]


class Broken(Exception):
    """The protocol has broken a promise."""


class TooMany(Exception):
    """There are more worlds than a protocol that ends has."""


MOST_WORLDS = 500_000
"""Nearly twice as many as the largest case of the tests has: 271,162, of a kilobyte each."""


class Rules(NamedTuple):
    """What members and the coordinator keep to."""

    finishes: bool = True
    """A member whose step misses nothing ends it before it looks who has died."""
    kills: bool = True
    """Who is only silent is ended before the others go on."""
    shows_to_all: bool = True
    """What a member gives is there for all others, or for none, whenever it dies."""
    confirms: bool = False
    """A step is applied when all have said that they have its result."""
    hands_on: bool = False
    """Who has applied a step hands its result on to those that lack it; all of an epoch end together. Who is silent is
    on another host: it is expelled, and may go on for all that is known."""
    leases: bool = True
    """Who is expelled ends by itself some time, since it does not hear from the coordinator any more."""
    holds_back: bool = True
    """Who has given its state gives its part of no further step in that epoch."""
    checks_epoch: bool = True
    """States of an epoch before are refused, by the joiner and by the coordinator."""


class World(NamedTuple):
    """Made and looked up by the hundred thousand, in which tuples are twice as fast as frozen dataclasses."""

    members: tuple[Member, ...]
    coordinator: Coordinator
    failures: int
    rules: Rules
    goal: int
    dead: Contributors = frozenset()
    unknown: Contributors = frozenset()
    """Dead, and the coordinator has not heard of it."""
    silent: Contributors = frozenset()
    expelled: Contributors = frozenset()
    gone: Contributors = frozenset()
    """Have come to their end."""
    shown: frozenset[tuple[str, int, int, int, int]] = frozenset()
    """What is given (`part`, `result`): epoch, step, by whom, to whom."""
    reports: frozenset[Report] = frozenset()
    forms: frozenset[tuple[int, Form]] = frozenset()
    log: tuple[Log, ...] = ()
    """Of each member, the steps that it has applied, and who contributed; a joiner's begins with its giver's."""
    joiner: int | None = None
    """Who comes while the others train: a member from when it has taken a state."""
    asked: frozenset[tuple[int, tuple[int, ...]]] = frozenset()
    """Words under way that ask a member for its state, and for whom."""
    given: frozenset[tuple[Member, Log]] = frozenset()
    """States that lie there for the joiner."""
    leaves: int = 0
    """How many members may be asked to leave yet."""
    asked_for_result: frozenset[tuple[int, int]] = frozenset()
    """Words under way that ask a member for the result of its last step, in an epoch."""
    results: frozenset[tuple[int, int, Contributors]] = frozenset()
    """These, on their way to the coordinator: epoch, step, and who contributed."""
    handed: frozenset[tuple[int, int, Contributors]] = frozenset()
    """And on their way to a member that lacks one: whom, step, and who contributed."""

    def successors(self) -> Iterator[tuple[str, World]]:
        for member in self.members:
            if member.rank not in self.dead | self.silent | self.gone:
                yield from self._of_member(member)
            if member.rank not in self.dead | self.gone:
                yield from self._failing(member.rank)
        for rank in self.expelled - self.dead - self.gone if self.rules.leases else ():
            yield f"{rank}'s lease ends", self._replace(dead=self.dead | {rank})
        yield from self._of_joiner()
        yield from self._of_coordinator()

    def _of_member(self, member: Member) -> Iterator[tuple[str, World]]:
        rank, ranks = member.rank, member.membership.ranks
        for to, form in self.forms:
            if to == rank and not (self.rules.kills and form.membership.epoch <= member.membership.epoch):
                yield f"{rank} takes the word of epoch {form.membership.epoch}", self._formed(member, form)
        if member.has_stopped:
            yield from self._of_results(member)
            return
        ends = member.applied == self.goal
        if ends and self.rules.hands_on:  # the last meeting, to which all of the epoch come
            ends = all(other.applied == self.goal for other in self.members if other.rank in ranks)
        if ends:
            coordinator, forms = self._hearing(lambda: self.coordinator.ended(rank))
            yield (
                f"{rank} has come to its end",
                self._replace(gone=self.gone | {rank}, coordinator=coordinator, forms=forms),
            )
            return
        if self._is_between(member):
            for to, whom in self.asked:
                if to == rank and not member.gives:
                    yield f"{rank} gives its state", self._giving(member, whom)
            if self.leaves and member.applied < self.goal:
                coordinator, forms = self._hearing(lambda: self.coordinator.ended(rank))
                left = self._replace(leaves=self.leaves - 1, gone=self.gone | {rank})
                yield f"{rank} leaves", left._replace(coordinator=coordinator, forms=forms)
        if member.gives:
            yield f"{rank} stops for who joins", self._stopping(member)
            if self.rules.holds_back:
                return
        receivers = [other for other in ranks if other != rank] or ranks
        for receiver in receivers if member.applied < self.goal else ():
            if ("part", *self._place(member), rank, receiver) not in self.shown:
                yield f"{rank} gives its part to {self._whom(receiver)}", self._showing("part", member, receiver)
                break
        has_given = all(("part", *self._place(member), rank, receiver) in self.shown for receiver in ranks)
        has_parts = has_given and self._has_all("part", member)
        if has_parts and not member.holds:
            yield f"{rank} has the result", self._with(member.with_result())
        if member.holds and self.rules.confirms:
            for receiver in ranks:
                if ("result", *self._place(member), rank, receiver) not in self.shown:
                    yield f"{rank} tells {receiver} that it has the result", self._showing("result", member, receiver)
                    break
        if member.holds and (not self.rules.confirms or self._has_all("result", member)):
            yield f"{rank} applies step {member.applied + 1}", self._applied(member.with_step_applied(), ranks)
        epoch = member.membership.epoch
        left = {
            other.rank
            for other in self.members
            if other.membership.epoch > epoch or (other.has_stopped and other.membership.epoch == epoch)
        }
        lost = (self.dead | self.gone | self.expelled | left) & set(ranks)
        misses = any(("part", *self._place(member), other, rank) not in self.shown for other in lost)
        if lost and (misses or not self.rules.finishes):
            yield f"{rank} misses a member and stops", self._stopping(member)
        if not self.rules.kills and (self.silent - lost) & set(ranks):
            yield f"{rank} gives up waiting", self._stopping(member)

    def _of_results(self, member: Member) -> Iterator[tuple[str, World]]:
        rank = member.rank
        for to, epoch in self.asked_for_result:
            if to == rank:
                asked = self.asked_for_result - {(to, epoch)}
                results = self.results | {(epoch, *self.log[rank][-1])}
                yield f"{rank} hands on its result", self._replace(asked_for_result=asked, results=results)
        for to, step, contributors in self.handed:
            if to == rank:
                world = self._replace(handed=self.handed - {(to, step, contributors)})
                try:
                    member = member.with_result_handed_on(step)
                except StaleEpoch as stale:
                    raise Broken(str(stale)) from None
                world = world._replace(reports=world.reports | {member.report()})
                yield f"{rank} applies the result of step {step}", world._applied(member, tuple(contributors))

    def _of_joiner(self) -> Iterator[tuple[str, World]]:
        joiner = self.joiner
        if joiner is None or joiner in self.dead | self.gone | self.expelled or joiner in self.coordinator.living:
            return
        if joiner not in [member.rank for member in self.members]:
            yield from self._failing(joiner)
        if joiner in self.silent:
            return
        if joiner not in self.coordinator.joining:
            yield f"{joiner} is ready to join", self._replace(coordinator=self.coordinator.joined(joiner))._asking()
            return
        before = next((member for member in self.members if member.rank == joiner), None)
        for state, log in self.given:
            try:
                taken = state.state_taken(joiner, before=before)
            except StaleEpoch:
                if self.rules.checks_epoch:
                    continue
                taken = state.state_taken(joiner, before=None)
            report = taken.report()
            if not self.rules.checks_epoch:
                report = replace(report, epoch=self.coordinator.membership.epoch)
            world = self._with(taken)
            if joiner not in [member.rank for member in self.members]:
                world = world._replace(members=(*self.members, taken))
            logs = tuple(log if rank == joiner else other for rank, other in enumerate(self.log))
            left = self.given - {(state, log)}
            yield (
                f"{joiner} takes the state of {state.rank}",
                world._replace(log=logs, given=left, reports=self.reports | {report}),
            )

    def _is_between(self, member: Member) -> bool:
        """Whether it has given nothing of its next step."""
        return not member.holds and not any(
            entry[:4] == ("part", *self._place(member), member.rank) for entry in self.shown
        )

    def _giving(self, member: Member, whom: tuple[int, ...]) -> World:
        gives = member.with_state_given(whom)
        world = self._replace(
            given=self.given | {(gives, self.log[member.rank])}, asked=self.asked - {(member.rank, whom)}
        )
        return world._with(gives)

    def _stopping(self, member: Member) -> World:
        stopped = member.stopped()
        return self._with(stopped)._replace(reports=self.reports | {stopped.report()})

    def _asking(self) -> World:
        """Somebody is asked for a state, where somebody waits for one, or for the result of a step that others lack."""
        ahead, giver = self.coordinator.ahead, self.coordinator.giver
        world = self
        if ahead is not None:
            asked = (ahead, self.coordinator.membership.epoch)
            world = self._replace(asked_for_result=self.asked_for_result | {asked})
        return world if giver is None else world._replace(asked=self.asked | {(giver, self.coordinator.joining)})

    def _failing(self, rank: int) -> Iterator[tuple[str, World]]:
        if self.failures and rank not in self.silent:
            left = self._replace(failures=self.failures - 1)
            yield f"{rank} dies", left._replace(dead=self.dead | {rank}, unknown=self.unknown | {rank})
            if self.rules.hands_on:
                if rank in (*self.coordinator.living, *self.coordinator.joining):
                    yield (
                        f"{rank} is silent and expelled",
                        left._replace(expelled=self.expelled | {rank})._told_dead(rank),
                    )
                return
            yield f"{rank} is stopped", left._replace(silent=self.silent | {rank})
        if rank in self.silent:
            yield f"{rank} goes on", self._replace(silent=self.silent - {rank})
            if self.rules.kills:
                world = self._replace(silent=self.silent - {rank})
                yield (
                    f"{rank} is silent and ended",
                    world._replace(dead=self.dead | {rank}, unknown=self.unknown | {rank}),
                )
            elif rank in self.coordinator.living:
                yield f"{rank} is silent and taken for dead", self._told_dead(rank)

    def _of_coordinator(self) -> Iterator[tuple[str, World]]:
        for rank in self.unknown:
            yield (
                f"the coordinator hears of {rank}'s death",
                self._told_dead(rank)._replace(unknown=self.unknown - {rank}),
            )
        for report in self.reports:
            coordinator, forms = self._hearing(lambda report=report: self.coordinator.hear(report))
            world = self._replace(reports=self.reports - {report}, coordinator=coordinator, forms=forms)._asking()
            yield f"{report.rank}'s report of epoch {report.epoch} comes", world
        for epoch, step, contributors in self.results:
            coordinator, told = self.coordinator.handed_on(epoch=epoch, step=step)
            yield (
                f"the result of step {step} comes",
                self._replace(
                    results=self.results - {(epoch, step, contributors)},
                    coordinator=coordinator,
                    handed=self.handed.union((rank, step, contributors) for rank in told),
                ),
            )

    def _told_dead(self, rank: int) -> World:
        coordinator, forms = self._hearing(lambda: self.coordinator.ended(rank))
        return self._replace(coordinator=coordinator, forms=forms)._asking()

    def _hearing(self, event) -> tuple[Coordinator, frozenset[tuple[int, Form]]]:
        try:
            coordinator, form = event()
        except StaleEpoch:
            return self.coordinator, self.forms
        except RunFailed as failure:
            raise Broken(str(failure)) from None
        if coordinator.ahead is not None and not self.rules.hands_on:
            raise Broken(f"rank {coordinator.ahead} has applied a step whose result {coordinator.behind} do not have")
        words = [] if form is None else [(rank, form) for rank in form.membership.ranks]
        return coordinator, self.forms.union(words)

    def _formed(self, member: Member, form: Form) -> World:
        world = self._replace(forms=self.forms - {(member.rank, form)})
        try:
            formed, applies = member.formed(form)
        except StaleEpoch:
            return world
        except AssertionError:
            raise Broken(
                f"{member.rank} has applied {member.applied} steps and is to go on after {form.step}"
            ) from None
        return world._applied(formed, member.membership.ranks) if applies else world._with(formed)

    def _place(self, member: Member) -> tuple[int, int]:
        return member.membership.epoch, member.applied + 1

    def _whom(self, receiver: int) -> str:
        return "all" if self.rules.shows_to_all else str(receiver)

    def _showing(self, what: str, member: Member, receiver: int) -> World:
        receivers = member.membership.ranks if self.rules.shows_to_all else (receiver, member.rank)
        return self._replace(shown=self.shown.union((what, *self._place(member), member.rank, to) for to in receivers))

    def _has_all(self, what: str, member: Member) -> bool:
        place = self._place(member)
        return all((what, *place, other, member.rank) in self.shown for other in member.membership.ranks)

    def _with(self, member: Member) -> World:
        members = tuple(member if other.rank == member.rank else other for other in self.members)
        return self._replace(members=members)

    def _applied(self, member: Member, contributors: tuple[int, ...]) -> World:
        entry = (member.applied, frozenset(contributors))
        log = list(self.log)
        log[member.rank] = (*log[member.rank], entry)
        # Over messages the dead, and who has left, may have applied what nobody else has: nobody goes on from there.
        ended = {
            each.rank for each in self.members if each.rank in self.gone - self.expelled and each.applied == self.goal
        }
        count = {*self.coordinator.living} - self.dead | ended if self.rules.hands_on else {*range(len(log))}
        for rank in count if member.rank in count else ():
            for step, theirs in log[rank]:
                if step == entry[0] and theirs != entry[1]:
                    raise Broken(f"step {step} is applied of {sorted(theirs)} here and of {sorted(entry[1])} there")
        return self._with(member)._replace(log=tuple(log))

    def require_goal(self) -> None:
        """Nothing more can happen. Who would join, and has not when the others end, is sent away."""
        taking_part = set(self.coordinator.living) - self.dead - self.silent - self.gone
        stuck = [member.rank for member in self.members if member.rank in taking_part and member.applied < self.goal]
        if stuck:
            raise Broken(f"ranks {stuck} wait for ever")
        orphans = sorted(self.expelled - self.dead - self.gone)
        if orphans:
            raise Broken(f"ranks {orphans} are expelled, and nobody ends them")


def explore(
    rules: Rules,
    *,
    num_workers: int = 3,
    failures: int = 2,
    goal: int = 1,
    joins: bool = False,
    leaves: int = 0,
    most_worlds: int = MOST_WORLDS,
) -> tuple[int, list[str] | None]:
    """The number of worlds that can come to be, and the shortest way to a broken promise, if there is one.

    Args:
        joins: the last worker comes while the others train.
        leaves: how many may be asked to leave.

    Raises:
        TooMany: there are more worlds than these, as where something can be said again and again.
    """
    membership = Membership.first(num_workers - joins)
    first = World(
        tuple(Member(rank, membership) for rank in membership.ranks),
        Coordinator.first(membership),
        failures,
        rules,
        goal,
        log=((),) * num_workers,
        joiner=num_workers - 1 if joins else None,
        leaves=leaves,
    )
    came_by: dict[World, tuple[str, World] | None] = {first: None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        try:
            is_last = True
            for what, successor in world.successors():
                is_last = False
                way = (what, world)
                if came_by.setdefault(successor, way) is way:
                    queue.append(successor)
            if len(came_by) > most_worlds:
                way_there = "; ".join(_way(came_by, world)[-8:])
                raise TooMany(f"more than {most_worlds:,} worlds, and no end in sight; the last one by: {way_there}")
            if is_last:
                world.require_goal()
        except Broken as broken:
            return len(came_by), [*_way(came_by, world), str(broken)]
    return len(came_by), None


def _way(came_by: dict[World, tuple[str, World] | None], world: World) -> list[str]:
    way: list[str] = []
    while (step := came_by[world]) is not None:
        way.append(step[0])
        world = step[1]
    return way[::-1]
