"""Carries a mixer's messages to neighbours and back."""

from collections.abc import Mapping
from typing import final

from paceline.comm.base import Collective, Timing, Work
from paceline.strategies.gossip.parcel import Message
from paceline.strategies.overlap import Overlap
from paceline.strategies.pacing import Pacing


@final
class Links:
    """One exchange at a time, from `start` to `wait`."""

    def __init__(self, collective: Collective, pacing: Pacing) -> None:
        self._collective = collective
        self._overlap = Overlap(collective.timing, now_s=pacing.now_s)
        self._works: list[tuple[Work, int]] = []
        self._lost: set[int] = set()
        self.are_busy = False

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self._collective.timing, self._overlap.timing)

    def start(self, outgoing: Mapping[int, Message], incoming: Mapping[int, Message]) -> None:
        """Messages must be left alone until `wait` returns."""
        rank, size = self._collective.rank, self._collective.size
        peers = sorted({*outgoing, *incoming}, key=lambda peer: (peer - rank) % size)  # not all to one peer first
        sends = [(peer, False) for peer in peers if peer in outgoing]
        receives = [(peer, True) for peer in peers if peer in incoming]
        posts = receives + sends
        if not self._collective.can_receive_first:  # of each two, the lower rank sends first
            posts.sort(key=lambda post: (post[0], post[1] == (rank < post[0])))
        for peer, is_received in posts:
            if is_received:
                work = self._collective.recv(incoming[peer].buffer, source=peer)
            else:
                work = self._collective.send_once(outgoing[peer].buffer, destination=peer)
            self._works.append((work, peer))
        self.are_busy = True
        self._overlap.begin()

    def lead_among(self, collective: Collective) -> None:
        """Other workers are there, and nothing is under way among them. What was, is given up."""
        self._collective = collective
        self._overlap.end()
        self._works.clear()
        self._lost.clear()
        self.are_busy = False

    def settle(self) -> None:
        """Nothing is on its way any more; what has come is still to be waited for."""
        self._overlap.end()
        for work, peer in self._works:
            work.wait()
            if work.is_lost:
                self._lost.add(peer)
        self._works.clear()

    def wait(self) -> set[int]:
        """Everything has come, or is lost: returns whose messages are."""
        self.settle()
        self.are_busy = False
        lost, self._lost = self._lost, set()
        return lost
