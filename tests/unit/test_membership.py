"""Who takes part, and the epochs of that."""

from __future__ import annotations

import pytest

from paceline.membership import Membership


def test_a_run_begins_with_the_first_ranks() -> None:
    first = Membership.first(3)
    assert (first.epoch, first.ranks, first.size) == (1, (0, 1, 2), 3)


@pytest.mark.parametrize("ranks", [(), (-1, 0), (1, 0), (0, 0)])
def test_ranks_ascend(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        Membership(1, ranks)
