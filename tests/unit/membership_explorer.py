"""Every order of events that the membership protocol can meet, for a few workers, steps and failures.

A world is a value: members, coordinator, what lies in shared memory, and words under way. Rules can be left out, one at
a time, to see what each is there for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.elastic import Coordinator, Form, Member, Report, StaleEpoch
from paceline.errors import RunFailed
from paceline.membership import Membership

Contributors = frozenset[int]
Log = tuple[tuple[int, Contributors], ...]


class Broken(Exception):
    """The protocol has broken a promise."""


@dataclass(frozen=True)
class Rules:
    """What members and the coordinator keep to."""

    finishes: bool = True
    """A member whose step misses nothing ends it before it looks who has died."""
    kills: bool = True
    """Who is only silent is ended before the others go on."""
    shows_to_all: bool = True
    """What a member gives is there for all others, or for none, whenever it dies."""
    confirms: bool = False
    """A step is applied when all have said that they have its result."""
    holds_back: bool = True
    """Who has given its state gives its part of no further step in that epoch."""
    checks_epoch: bool = True
    """States of an epoch before are refused, by the joiner and by the coordinator."""


@dataclass(frozen=True)
class World:
    members: tuple[Member, ...]
    coordinator: Coordinator
    failures: int
    rules: Rules
    goal: int
    dead: Contributors = frozenset()
    unknown: Contributors = frozenset()
    """Dead, and the coordinator has not heard of it."""
    silent: Contributors = frozenset()
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

    def successors(self) -> Iterator[tuple[str, World]]:
        for member in self.members:
            if member.rank not in self.dead | self.silent | self.gone:
                yield from self._of_member(member)
            if member.rank not in self.dead | self.gone:
                yield from self._failing(member.rank)
        yield from self._of_joiner()
        yield from self._of_coordinator()

    def _of_member(self, member: Member) -> Iterator[tuple[str, World]]:
        rank, ranks = member.rank, member.membership.ranks
        for to, form in self.forms:
            if to == rank and not (self.rules.kills and form.membership.epoch <= member.membership.epoch):
                yield f"{rank} takes the word of epoch {form.membership.epoch}", self._formed(member, form)
        if member.has_stopped:
            return
        if member.applied == self.goal:
            coordinator, forms = self._hearing(lambda: self.coordinator.ended(rank))
            yield (
                f"{rank} has come to its end",
                replace(self, gone=self.gone | {rank}, coordinator=coordinator, forms=forms),
            )
            return
        if self._is_between(member):
            for to, whom in self.asked:
                if to == rank and not member.gives:
                    yield f"{rank} gives its state", self._giving(member, whom)
            if self.leaves:
                coordinator, forms = self._hearing(lambda: self.coordinator.ended(rank))
                left = replace(self, leaves=self.leaves - 1, gone=self.gone | {rank})
                yield f"{rank} leaves", replace(left, coordinator=coordinator, forms=forms)
        if member.gives:
            yield f"{rank} stops for who joins", self._stopping(member)
            if self.rules.holds_back:
                return
        for receiver in ranks:
            if ("part", *self._place(member), rank, receiver) not in self.shown:
                yield f"{rank} gives its part to {self._whom(receiver)}", self._showing("part", member, receiver)
                break
        has_parts = self._has_all("part", member)
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
        lost = (self.dead | self.gone | left) & set(ranks)
        misses = any(("part", *self._place(member), other, rank) not in self.shown for other in lost)
        if lost and (misses or not self.rules.finishes):
            yield f"{rank} misses a member and stops", self._stopping(member)
        if not self.rules.kills and (self.silent - lost) & set(ranks):
            yield f"{rank} gives up waiting", self._stopping(member)

    def _of_joiner(self) -> Iterator[tuple[str, World]]:
        joiner = self.joiner
        if joiner is None or joiner in self.dead | self.gone or joiner in self.coordinator.living:
            return
        if joiner not in [member.rank for member in self.members]:
            yield from self._failing(joiner)
        if joiner in self.silent:
            return
        if joiner not in self.coordinator.joining:
            yield f"{joiner} is ready to join", replace(self, coordinator=self.coordinator.joined(joiner))._asking()
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
                world = replace(world, members=(*self.members, taken))
            logs = tuple(log if rank == joiner else other for rank, other in enumerate(self.log))
            left = self.given - {(state, log)}
            yield (
                f"{joiner} takes the state of {state.rank}",
                replace(world, log=logs, given=left, reports=self.reports | {report}),
            )

    def _is_between(self, member: Member) -> bool:
        """Whether it has given nothing of its next step."""
        return not member.holds and not any(
            entry[:4] == ("part", *self._place(member), member.rank) for entry in self.shown
        )

    def _giving(self, member: Member, whom: tuple[int, ...]) -> World:
        gives = member.with_state_given(whom)
        world = replace(
            self, given=self.given | {(gives, self.log[member.rank])}, asked=self.asked - {(member.rank, whom)}
        )
        return world._with(gives)

    def _stopping(self, member: Member) -> World:
        stopped = member.stopped()
        return replace(self._with(stopped), reports=self.reports | {stopped.report()})

    def _asking(self) -> World:
        """Somebody is asked for a state, where somebody waits for one."""
        giver = self.coordinator.giver
        return self if giver is None else replace(self, asked=self.asked | {(giver, self.coordinator.joining)})

    def _failing(self, rank: int) -> Iterator[tuple[str, World]]:
        if self.failures and rank not in self.silent:
            left = replace(self, failures=self.failures - 1)
            yield f"{rank} dies", replace(left, dead=self.dead | {rank}, unknown=self.unknown | {rank})
            yield f"{rank} is stopped", replace(left, silent=self.silent | {rank})
        if rank in self.silent:
            yield f"{rank} goes on", replace(self, silent=self.silent - {rank})
            if self.rules.kills:
                world = replace(self, silent=self.silent - {rank})
                yield (
                    f"{rank} is silent and ended",
                    replace(world, dead=self.dead | {rank}, unknown=self.unknown | {rank}),
                )
            elif rank in self.coordinator.living:
                yield f"{rank} is silent and taken for dead", self._told_dead(rank)

    def _of_coordinator(self) -> Iterator[tuple[str, World]]:
        for rank in self.unknown:
            yield (
                f"the coordinator hears of {rank}'s death",
                replace(self._told_dead(rank), unknown=self.unknown - {rank}),
            )
        for report in self.reports:
            coordinator, forms = self._hearing(lambda report=report: self.coordinator.hear(report))
            world = replace(self, reports=self.reports - {report}, coordinator=coordinator, forms=forms)._asking()
            yield f"{report.rank}'s report of epoch {report.epoch} comes", world

    def _told_dead(self, rank: int) -> World:
        coordinator, forms = self._hearing(lambda: self.coordinator.ended(rank))
        return replace(self, coordinator=coordinator, forms=forms)._asking()

    def _hearing(self, event) -> tuple[Coordinator, frozenset[tuple[int, Form]]]:
        try:
            coordinator, form = event()
        except StaleEpoch:
            return self.coordinator, self.forms
        except RunFailed as failure:
            raise Broken(str(failure)) from None
        words = [] if form is None else [(rank, form) for rank in form.membership.ranks]
        return coordinator, self.forms.union(words)

    def _formed(self, member: Member, form: Form) -> World:
        world = replace(self, forms=self.forms - {(member.rank, form)})
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
        receivers = member.membership.ranks if self.rules.shows_to_all else (receiver,)
        return replace(self, shown=self.shown.union((what, *self._place(member), member.rank, to) for to in receivers))

    def _has_all(self, what: str, member: Member) -> bool:
        place = self._place(member)
        return all((what, *place, other, member.rank) in self.shown for other in member.membership.ranks)

    def _with(self, member: Member) -> World:
        members = tuple(member if other.rank == member.rank else other for other in self.members)
        return replace(self, members=members)

    def _applied(self, member: Member, contributors: tuple[int, ...]) -> World:
        entry = (member.applied, frozenset(contributors))
        log = list(self.log)
        log[member.rank] = (*log[member.rank], entry)
        for other in log:
            for step, theirs in other:
                if step == entry[0] and theirs != entry[1]:
                    raise Broken(f"step {step} is applied of {sorted(theirs)} here and of {sorted(entry[1])} there")
        return replace(self._with(member), log=tuple(log))

    def require_goal(self) -> None:
        """Nothing more can happen. Who would join, and has not when the others end, is sent away."""
        taking_part = set(self.coordinator.living) - self.dead - self.silent - self.gone
        stuck = [member.rank for member in self.members if member.rank in taking_part and member.applied < self.goal]
        if stuck:
            raise Broken(f"ranks {stuck} wait for ever")


def explore(
    rules: Rules, *, num_workers: int = 3, failures: int = 2, goal: int = 1, joins: bool = False, leaves: int = 0
) -> tuple[int, list[str] | None]:
    """The number of worlds that can come to be, and the shortest way to a broken promise, if there is one.

    Args:
        joins: the last worker comes while the others train.
        leaves: how many may be asked to leave.
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
                if successor not in came_by:
                    came_by[successor] = (what, world)
                    queue.append(successor)
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
