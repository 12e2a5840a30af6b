"""How much may be under way to a server."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.windows import SendWindow


@given(sizes=st.lists(st.integers(0, 100), max_size=40), limit=st.integers(1, 120), data=st.data())
def test_everything_goes_in_order_and_never_more_than_the_limit(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    window: SendWindow[int] = SendWindow(limit_bytes=limit)
    for index, size in enumerate(sizes):
        window.put(index, size)
    sent = list(window.take())
    num_answered = 0
    while num_answered < len(sent):
        under_way = sizes[num_answered : len(sent)]
        assert sum(under_way) <= limit or len(under_way) == 1
        for _ in range(data.draw(st.integers(1, len(under_way)))):
            window.answered()
            num_answered += 1
        sent += window.take()
    assert sent == list(range(len(sizes)))


def test_the_next_goes_when_it_fits() -> None:
    window: SendWindow[str] = SendWindow(limit_bytes=4)
    for name, num_bytes in (("a", 2), ("b", 2), ("c", 3), ("too large", 9), ("d", 1)):
        window.put(name, num_bytes)
    assert list(window.take()) == ["a", "b"]
    window.answered()
    assert list(window.take()) == []
    window.answered()
    assert list(window.take()) == ["c"]
    window.answered()
    assert list(window.take()) == ["too large"]
    assert list(window.take()) == []
    window.answered()
    assert list(window.take()) == ["d"]


def test_without_a_limit_all_go_at_once() -> None:
    window: SendWindow[int] = SendWindow(limit_bytes=math.inf)
    for index in range(5):
        window.put(index, 10**9)
    assert list(window.take()) == [0, 1, 2, 3, 4]
    window.answered()
    assert list(window.take()) == []
