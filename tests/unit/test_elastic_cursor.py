"""The one cursor of an epoch's data: every sample counts once, whoever comes and dies when."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic import Cursor, Deal, Elastic, resized
from paceline.errors import UsageError

GROUPS = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]], [[12], [13, 14], [15, 16]]]


@st.composite
def schedules(draw):
    """Groups as the loader makes them, and who dies and comes in which round."""
    size, batch = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    num_samples = draw(st.integers(size, 60))
    num_groups = max(1, num_samples // (size * batch))
    numbers = iter(range(num_samples))
    groups = [[[next(numbers) for _ in range(batch)] for _ in range(size)] for _ in range(num_groups - 1)]
    last = list(numbers)
    bounds = [len(last) * part // size for part in range(size + 1)]
    groups.append([last[a:b] for a, b in itertools.pairwise(bounds)])
    deaths = draw(st.dictionaries(st.integers(0, 12), st.integers(1, size), max_size=3))
    joins = draw(st.dictionaries(st.integers(0, 12), st.integers(1, 3), max_size=3))
    return groups, size, deaths, joins, draw(st.sampled_from(["keep", "grow"]))


@given(schedules())
def test_every_sample_counts_once(schedule) -> None:
    groups, size, deaths, joins, global_batch = schedule
    cursor, counted, updates = Cursor(), Counter(), []
    pending: list[float] = []
    for number in range(1000):
        dealt = cursor.deal(groups, size=size, global_batch=global_batch)
        if dealt is None:
            break
        assert len(dealt.parts) == size
        lost = set(range(min(deaths.get(number, 0), size - 1)))
        if lost:
            dealt = dealt.without(lost, global_batch=global_batch)
            size -= len(lost)
        if dealt.begins and number in joins:  # a joiner has nothing of an update that is under way
            dealt = dealt.joined(joins[number])
            size += joins[number]
            assert not any(dealt.parts[-joins[number] :])
        assert Deal.of_plain(dealt.plain) == dealt
        counted.update(sample for part in dealt.parts for sample in part)
        if dealt.begins:
            pending = []
        pending += [dealt.weight(place) / size for place in range(size)]
        cursor = dealt.after
        if cursor.is_update_complete(global_batch=global_batch):
            updates.append(sum(pending))
            pending = []
    else:
        pytest.fail("the epoch has no end")
    samples = [sample for group in groups for part in group for sample in part]
    assert counted == Counter(samples)
    assert not pending
    assert updates == pytest.approx([1.0] * len(updates))
    if global_batch == "keep":
        assert len(updates) == len(groups)


@pytest.mark.parametrize("global_batch", ["keep", "grow"])
def test_without_deaths_parts_are_the_groups_own(global_batch) -> None:
    cursor, dealt = Cursor(), []
    while (dealing := cursor.deal(GROUPS, size=3, global_batch=global_batch)) is not None:
        dealt.append([list(part) for part in dealing.parts])
        assert sum(dealing.weight(place) for place in range(3)) == pytest.approx(3.0)
        cursor = dealing.after
    assert dealt == GROUPS


def test_a_kept_global_batch_is_completed_before_the_next_one_begins() -> None:
    first = Cursor().deal(GROUPS, size=3, global_batch="keep")
    repeated = first.without({1}, global_batch="keep")
    assert repeated.parts == ((0, 1), (4, 5))
    assert [repeated.weight(place) for place in range(2)] == pytest.approx([2 * 2 / 6] * 2)
    assert not repeated.after.is_update_complete(global_batch="keep")
    second = repeated.after.deal(GROUPS, size=2, global_batch="keep")
    assert (second.parts, second.begins) == (((2,), (3,)), False)
    assert second.after.is_update_complete(global_batch="keep")
    third = second.after.deal(GROUPS, size=2, global_batch="keep")
    assert (third.parts, third.begins) == (((6,), (7, 8)), True)
    fourth = third.after.deal(GROUPS, size=2, global_batch="keep")
    assert (fourth.parts, fourth.begins) == (((9,), (10, 11)), False)


def test_a_growing_batch_is_as_large_as_those_who_are_there() -> None:
    first = Cursor().deal(GROUPS, size=3, global_batch="grow").without({0}, global_batch="grow")
    assert [first.weight(place) for place in range(2)] == [1.0, 1.0]
    second = first.after.deal(GROUPS, size=2, global_batch="grow")
    assert second.parts == ((0, 1), (6, 7))


def test_settings() -> None:
    assert Elastic.parse("2:4", global_batch="grow").global_batch == "grow"
    for text in ("2", "a:b", "0:3", "4:2"):
        with pytest.raises(UsageError, match="--elastic"):
            Elastic.parse(text)
    Elastic.parse("2:4").require(num_workers=3)
    for num_workers in (1, 5):
        with pytest.raises(UsageError, match=f"2 to 4 workers, and the run would start with --workers {num_workers}"):
            Elastic.parse("2:4").require(num_workers=num_workers)


@given(schedules(), st.integers(1, 4))
def test_every_sample_counts_once_where_an_exchange_is_of_several_rounds(schedule, every: int) -> None:
    """As under local updates, where a pass ends with an exchange, in which workers may have died."""
    groups, size, deaths, joins, _ = schedule
    cursor, counted = Cursor(), Counter()
    for number in range(1000):
        deals = []
        reached = cursor
        while len(deals) < every and (dealt := reached.deal(groups, size=size, global_batch="grow")) is not None:
            deals.append(dealt)
            reached = dealt.after
        if not deals:
            break
        lost = range(min(deaths.get(number, 0), size - 1))
        changed = resized(deals, lost=lost, num_joiners=joins.get(number, 0), global_batch="grow")
        size += joins.get(number, 0) - len(lost)
        assert all(len(dealt.parts) == size for dealt in changed)
        counted.update(sample for dealt in changed for part in dealt.parts for sample in part)
        cursor = changed[-1].after
    assert counted == Counter(sample for group in groups for part in group for sample in part)


def test_who_joins_when_all_who_had_samples_are_gone_stands_in_with_one_that_is_dealt_anew() -> None:
    """Of an update's last sample, which went with the one that had it."""
    groups = [[(5,), (6,), (7,)]]
    last = Cursor(1, rest=(7,)).deal(groups, size=3, global_batch="keep")
    assert last is not None
    assert last.parts == ((), (), (7,))
    (repeated,) = resized([last], lost=[2], num_joiners=1, global_batch="keep")
    assert repeated.parts == ((), (), ())
    assert repeated.stand_in == (7,)
    again = repeated.after.deal(groups, size=3, global_batch="keep")
    assert again is not None
    assert again.parts == last.parts
