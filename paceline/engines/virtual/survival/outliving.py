"""Simulated servers outlive workers: they go on without one that is gone, and take in one who comes."""

from collections.abc import Callable, Sequence
from typing import final

from paceline.elastic import Done, LaneBook
from paceline.engines.virtual.server import VirtualServer
from paceline.server.whole_pushes import what_counts


@final
class Outliving:
    """As the launcher's `LettingGo` of real processes: all servers hear at the same moment. Methods are called on the
    timeline.

    Args:
        event: writes down what happens.
    """

    def __init__(self, servers: Sequence[VirtualServer], book: LaneBook, *, event: Callable[..., None]) -> None:
        self._servers, self.book, self._event = servers, book, event

    def let_go(self, rank: int) -> None:
        """This worker is gone. Its last gradient counts on all servers, or on none. Nothing is done a second time."""
        if not self.book.is_present(rank):
            return
        counts = what_counts([server.core.attendance.part_with(rank) for server in self._servers])
        done = Done(*counts.body["done"]) if counts is not None else Done()
        self.book.gone(rank, done)
        self._event("let_go", f"worker-{rank}", **done._asdict())
        first, *others = self._servers
        first.let_go(rank, counts, {})
        for server in others:
            server.let_go(rank, counts, first.core.attendance.decided)

    def let_in(self, rank: int) -> None:
        """This worker takes part from here on."""
        clock = max(server.core.attendance.expect(rank) for server in self._servers)
        for server in self._servers:
            server.let_in(rank, clock)
        self.book.come(rank)
        self._event("let_in", f"worker-{rank}", clock=clock)

    def last_push_s(self, rank: int) -> float:
        """When a server had word of this worker's last push; 0: never."""
        return max(server.pushed_s.get(rank, 0.0) for server in self._servers)
