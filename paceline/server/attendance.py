"""Who takes part at a server: workers come, wait aside, leave or die, and the others go on with or without them."""

import itertools
from collections.abc import Collection, Iterator, Set
from types import MappingProxyType
from typing import final

from paceline.messages import Message
from paceline.server.actions import Action, Send
from paceline.server.admission import Decisions
from paceline.server.answering import Answering, Client
from paceline.server.intake import Intake
from paceline.server.whole_pushes import Parted, WholePushes


@final
class Attendance:
    """A part of `ServerCore`.

    Args:
        answering: has the shards, and answers whoever can go on once another one has left.
        intake: takes the last push of a worker that is gone.
        pushes: what is here of each worker's pushes.
    """

    def __init__(self, answering: Answering, intake: Intake, pushes: WholePushes) -> None:
        self._answering, self._intake, self._pushes = answering, intake, pushes
        self._gone: set[int] = set()
        self.is_copied_apart = False
        """Whether some copies of this key range cannot reach the memory of workers on this host."""

    @property
    def active(self) -> Collection[int]:
        """Workers that take part."""
        parts = self._answering.parts
        return parts[-1].shard.rule.active if parts else ()

    @property
    def gone(self) -> Set[int]:
        """Workers of which nothing is heard any more."""
        return self._gone

    @property
    def can_be_copied(self) -> bool:
        """Whether all that is here and not closed comes again if it is lost: nothing of workers that are gone."""
        shards = [part.shard for part in self._answering.parts]
        return all(self._gone.isdisjoint(shard.rule.active) and shard.is_repeatable for shard in shards)

    @property
    def decided(self) -> Decisions:
        """What this server has decided for other servers that may not know of it yet: workers tell them, unless they
        die."""
        parts = self._answering.parts
        return parts[-1].shard.rule.decided if parts else {}

    # --- as the launcher says -----------------------------------------------------------------------------------

    def part_with(self, worker: int) -> Parted:
        """The worker is gone: nothing is heard of it from here on. Returns what is here of its pushes."""
        self._gone.add(worker)
        client = self._answering.clients.get(worker)
        reaches_memory = client is not None and client.is_beside and not self.is_copied_apart
        return self._pushes.parted(worker, reaches_memory=reaches_memory)

    def let_go(
        self, worker: int, counts: Message | None, now_s: float, *, decided: Decisions = MappingProxyType({})
    ) -> Iterator[Action]:
        """Go on without a worker, of which nothing is heard from here on, and which is told nothing. Nothing is done a
        second time.

        Args:
            counts: its last push that is to count, as `what_counts` says. If it does not do so here yet, its tensors
                are those that have come, or those in the worker's memory.
            decided: what the first server, which is told before the others, has decided by then (`decided`).
        """
        self._gone.add(worker)
        client, answering = self._answering.clients.get(worker), self._answering
        if client is None:
            return
        lacks = counts is not None and self._pushes.lacks(counts)
        parts = answering.numbered_parts
        taking = self._intake.count(client, counts, parts, now_s) if counts is not None and lacks else ()
        learning, leaving = self._learn(decided, now_s), self.leave(client, worker, now_s)
        for action in itertools.chain(taking, learning, leaving, answering.tick(now_s)):
            if not (isinstance(action, Send) and action.to == worker):
                yield action
        self._pushes.let_go(worker)
        last = self._pushes.last(worker)
        answering.tables.let_go(worker, clock=None if last is None else last.clock)

    def expect(self, worker: int) -> int:
        """A worker that has attached is to take part from here on. Returns the clock that it is expected at: under bsp
        no update of a later one is made here without it. Nothing is done a second time."""
        parts = self._answering.parts
        for part in parts:
            if worker not in part.shard.rule.active:
                part.shard.join(worker)
        return max(part.shard.rule.clock_of(worker) for part in parts)

    def let_in(self, worker: int, clock: int, now_s: float) -> Iterator[Action]:
        """All servers expect the worker, the last of them at this clock, for which it pushes first."""
        for index, part in self._answering.numbered_parts:
            yield from self._answering.answer(index, part, part.shard.begin_with(worker, clock), now_s)

    # --- as a worker says itself --------------------------------------------------------------------------------

    def leave(self, client: Client, worker: int, now_s: float) -> Iterator[Action]:
        """Nothing waits for the worker any more. It may still pull: its memory stays known."""
        answering = self._answering
        client.answers.clear()
        answering.window.forget(worker)
        answering.tables.leave(worker)
        for index, part in answering.numbered_parts:
            yield from answering.answer(index, part, part.shard.leave(worker), now_s)
        yield from answering.next_in_turn(now_s)

    def step_aside(self, worker: int, now_s: float) -> Iterator[Action]:
        """The worker waits for all others at a place of their scripts."""
        for index, part in self._answering.numbered_parts:
            yield from self._answering.answer(index, part, part.shard.step_aside(worker), now_s)

    def come_back(self, worker: int) -> None:
        """All are at that place, and the worker goes on."""
        for part in self._answering.parts:
            part.shard.come_back(worker)

    def _learn(self, decided: Decisions, now_s: float) -> Iterator[Action]:
        for index, part in self._answering.numbered_parts if decided else ():
            yield from self._answering.answer(index, part, part.shard.learn(decided), now_s)
