"""Two ends whose connection breaks at any time: what each sends arrives once, in order."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.delivery import Delivery, opened

Way = deque[Sequence[Any]]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["send", "deliver"]), st.sampled_from([0, 1])),
        st.tuples(st.just("break"), st.tuples(st.integers(0, 6), st.integers(0, 6))),
    ),
    max_size=150,
)


class Pair:
    """A caller and a listener, and what is on its way from each to the other."""

    def __init__(self) -> None:
        self.ends = (Delivery(7, calls=True), Delivery(7, calls=False))
        self.ways: tuple[Way, Way] = (deque(), deque())
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])
        self.arrived: tuple[list[bytes], list[bytes]] = ([], [])

    def put(self, end: int, frames: Sequence[Any]) -> None:
        if frames:
            self.ways[end].append(frames)

    def send(self, end: int) -> None:
        self.sent[end].append(struct.pack("<i", len(self.sent[end])))
        self.put(end, self.ends[end].send([self.sent[end][-1]]))

    def deliver(self, source: int) -> bool:
        if not self.ways[source]:
            return False
        envelope, frames = opened(self.ways[source].popleft())
        assert envelope is not None
        heard = self.ends[1 - source].hear(envelope, frames)
        for said in heard.say:
            self.put(1 - source, said)
        self.arrived[source].extend(bytes(frame) for frame in frames[:1] if heard.is_new)
        return True

    def broken(self, lost: tuple[int, int]) -> None:
        """The first messages of each way are lost; later ones come over the next connection."""
        for way, number in zip(self.ways, lost, strict=True):
            for _ in range(min(number, len(way))):
                way.popleft()
        self.put(0, self.ends[0].ask())


@given(events=EVENTS)
def test_what_is_sent_arrives_once_and_in_order(events: list[tuple[str, Any]]) -> None:
    pair = Pair()
    for what, about in events:
        {"send": pair.send, "deliver": pair.deliver, "break": pair.broken}[what](about)
    while pair.deliver(0) or pair.deliver(1):
        pass
    assert pair.arrived == pair.sent
    pair.put(0, pair.ends[0].ask())
    while pair.deliver(0) or pair.deliver(1):
        pass
    assert pair.ends[0].is_settled


@given(sizes=st.lists(st.integers(0, 1 << 24), min_size=1, max_size=60))
def test_nobody_keeps_much_for_one_who_only_listens(sizes: list[int]) -> None:
    pair = Pair()
    for size in sizes:
        pair.put(0, pair.ends[0].send([b"head", range(size)]))
        while pair.deliver(0) or pair.deliver(1):
            pass
    kept = [sum(map(len, frames)) for _, frames in pair.ends[0]._kept]
    assert len(kept) < 16
    assert sum(kept) < 16 << 20


def test_what_need_not_arrive_is_not_kept() -> None:
    pair = Pair()
    pair.put(0, pair.ends[0].send([b"pulse"], keep=False))
    assert pair.ends[0].is_settled
    assert pair.deliver(0)
    assert pair.arrived[0] == [b"pulse"]


def test_an_answer_from_before_the_last_break_does_not_count() -> None:
    """The new connection may not have been let in, and is then to be made anew."""
    pair = Pair()
    pair.send(0)
    pair.broken((1, 0))
    assert pair.deliver(0)
    pair.broken((0, 0))
    assert pair.deliver(1)
    assert pair.ends[0].is_asking
    while pair.deliver(0) or pair.deliver(1):
        pass
    assert not pair.ends[0].is_asking
    assert pair.arrived == pair.sent


def test_nothing_is_kept_for_an_end_that_is_gone() -> None:
    pair = Pair()
    pair.send(0)
    pair.send(1)
    pair.ends[1].keep_nothing()
    pair.send(1)
    assert pair.ends[1].is_settled
    assert pair.deliver(0)
    assert pair.arrived[0] == pair.sent[0]


def test_what_is_no_envelope() -> None:
    assert opened([]) == (None, [])
    assert opened([b"P1", b""]) == (None, [])
    assert opened([bytes(24)]) == ((0, 0, 0), [])
    assert opened([bytes(24) + b"P1", b""]) == ((0, 0, 0), [b"P1", b""])
