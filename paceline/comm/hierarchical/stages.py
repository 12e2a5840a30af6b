"""Moves all-reduces from stage to stage: reduced on this host, then across hosts, then handed round this host."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from paceline.comm.base import Collective, Finished, Work
from paceline.comm.hierarchical.host_shares import Division, HostShares


@dataclass(eq=False)
class Passage:
    division: Division
    finish: Callable[[], None] | None
    """What is to be done here once the result is in place."""
    work: Work
    cross: Callable[[], Work] | None = None
    """What averages hosts' sums, where that is not an all-reduce."""
    is_over: bool = False


@final
class Stages:
    """Moves all-reduces from each stage to the next in the order in which they were started.

    So every rank of a stage takes part in the same order, whoever is ready first.
    """

    def __init__(self, shares: HostShares, across: Collective | None, *, size: int) -> None:
        """`across` joins those who hold the same share (None: this rank holds none), `partners` in numbers of the
        world."""
        self._shares = shares
        self._across = across
        self._size = size
        self._reducing: deque[Passage] = deque()
        self._crossing: deque[Passage] = deque()
        self._handed_round: deque[Passage] = deque()
        self._moves = (
            (self._reducing, self._cross),
            (self._crossing, self._hand_round),
            (self._handed_round, self._end),
        )

    def submit(
        self, division: Division, finish: Callable[[], None] | None, cross: Callable[[], Work] | None = None
    ) -> Passage:
        passage = Passage(division, finish, self._shares.reduce(division), cross)
        self._reducing.append(passage)
        self.advance()
        return passage

    def advance(self) -> None:
        """Move everything on as far as possible without blocking."""
        for stage, move_on in self._moves:
            while stage and stage[0].work.poll():
                move_on(stage.popleft())

    def wait(self, passage: Passage) -> None:
        """Block until it is over, always on what started first: every rank can go on with that."""
        self.advance()
        while not passage.is_over:
            oldest = next(stage[0] for stage, _ in reversed(self._moves) if stage)
            oldest.work.wait()
            self.advance()

    def finish(self) -> None:
        for passage in (*self._handed_round, *self._crossing, *self._reducing):
            self.wait(passage)

    def close(self) -> None:
        for stage, _ in self._moves:
            stage.clear()

    def _cross(self, passage: Passage) -> None:
        division = passage.division
        if self._across is None or division.total.numel() == 0:
            passage.work = Finished()
        elif passage.cross is not None:
            passage.work = passage.cross()
        else:
            passage.work = self._across.all_reduce(division.total, op=division.op)
        self._crossing.append(passage)

    def _hand_round(self, passage: Passage) -> None:
        if passage.cross is not None and self._across is not None:
            passage.division.total.mul_(self._across.size)
        passage.division.settle(size=self._size)
        passage.work = self._shares.hand_round(passage.division)
        self._handed_round.append(passage)

    def _end(self, passage: Passage) -> None:
        if passage.finish is not None:
            passage.finish()
        passage.is_over = True
