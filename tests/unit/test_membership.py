"""Who takes part, and the epochs of that."""

from __future__ import annotations

import pytest

from paceline.membership import Membership


def test_each_change_begins_the_next_epoch() -> None:
    first = Membership.first(3)
    assert (first.epoch, first.ranks, first.size) == (1, (0, 1, 2), 3)
    assert first.without(1) == Membership(2, (0, 2))
    assert first.without(1).with_rank(7).with_rank(1) == Membership(4, (0, 1, 2, 7))
    assert first.ranks == (0, 1, 2)


@pytest.mark.parametrize("ranks", [(), (-1, 0), (1, 0), (0, 0)])
def test_ranks_ascend(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        Membership(1, ranks)


def test_nobody_leaves_or_comes_twice() -> None:
    with pytest.raises(ValueError, match="rank 5 is none of"):
        Membership.first(2).without(5)
    with pytest.raises(ValueError, match="rank 1 takes part already"):
        Membership.first(2).with_rank(1)
    with pytest.raises(ValueError, match="must ascend"):
        Membership.first(1).without(0)
