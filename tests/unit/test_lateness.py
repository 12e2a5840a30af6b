"""Rounds that wait for nobody: who is late, and by how much."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.lateness import Buffered, First
from paceline.running.serving import serve
from paceline.strategies import build
from tests.unit.federated_rounds import after

SIZES = (10,) * 40


def test_the_first_of_those_that_begin_count_and_the_others_are_late() -> None:
    sampler, asked = First(over=1.5), {"sizes": SIZES, "fraction": 0.25, "seed": 3}
    seen = Counter[int]()
    for number in range(300):
        counted, late = (of(number, **asked) for of in (sampler.draw, sampler.late))
        assert len(counted) == 10
        assert len({*counted, *late}) == len(counted) + len(late) == 15
        seen.update(counted)
    assert min(seen.values()) > 40, "where clients are alike, none is late for ever: of 300 rounds a client is in 75"


def test_those_behind_the_deadline_do_not_count_and_large_clients_are_late_more_often() -> None:
    """A half-normal turn takes longer than its mean with a probability of 2 (1 - Phi(sqrt(2 / pi)))."""
    asked: dict[str, Any] = {"sizes": SIZES, "fraction": 1.0, "seed": 3}
    num_late = sum(len(First(over=1.0, deadline=1.0).late(number, **asked)) for number in range(200))
    assert num_late / (200 * 40) == pytest.approx(math.erfc(1 / math.sqrt(math.pi)), abs=0.02)
    asked |= {"sizes": (5,) * 20 + (15,) * 20, "fraction": 0.5}
    counted = Counter(client // 20 for number in range(100) for client in First(over=2.0).draw(number, **asked))
    assert counted[0] > 2 * counted[1]


@pytest.mark.parametrize(("num_at_once", "num_counted"), [(1, 1), (5, 1), (20, 1), (8, 4), (4, 8), (21, 20)])
def test_changes_are_as_late_as_little_s_law_says(num_at_once: int, num_counted: int) -> None:
    """As many train at any time, and one begins with each change that comes: between a turn's begin and its end come
    the changes of all others that train, on the average, and every so many of them make a round."""
    sampler = Buffered(at_once=num_at_once / 40)
    asked = {"sizes": SIZES, "fraction": num_counted / 40, "seed": 1}
    behind = [late for number in range(50, 1050) for late in sampler.behind(number, **asked).values()]
    assert sum(behind) / len(behind) == pytest.approx((num_at_once - 1) / num_counted, rel=0.1, abs=0.02)


@settings(max_examples=40)
@given(
    num_at_once=st.integers(1, 12), num_counted=st.integers(1, 12), seed=st.integers(0, 99), first=st.integers(0, 30)
)
def test_models_are_kept_as_long_as_somebody_begins_with_them(
    num_at_once: int, num_counted: int, seed: int, first: int
) -> None:
    """And no longer, whichever round is asked for first."""
    sizes = tuple(range(1, 25))
    sampler, asked = Buffered(at_once=num_at_once / 24), {"sizes": sizes, "fraction": num_counted / 24, "seed": seed}
    sampler.behind(first, **asked)
    begun = [(number, number - late) for number in range(200) for late in sampler.behind(number, **asked).values()]
    for number in range(20):
        rest = [since for ended, since in begun if ended >= number]
        assert sampler.oldest(number, **asked) == min(rest)
        assert len(sampler.draw(number, **asked)) == num_counted
        assert sampler.draw(number, **asked) == [*sampler.behind(number, **asked)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("outer", "momentum"), [("average", 0.0), ("momentum", 0.5)])
def test_late_changes_are_of_the_model_that_they_began_with_and_count_less(
    outer: str, momentum: float, workers: int
) -> None:
    """A client's K steps of 0.1 on a (x - b)^2 / 2 take off (1 - (1 - 0.1 a)^K) (x - b), of the x of its time: FedBuff
    is a recursion over all models so far."""
    clients = [(1.0 + number % 3, float(number), 1 + number % 2) for number in range(12)]
    options: dict[str, Any] = {"clients": 12, "fraction": 0.25, "sampler.at_once": 0.5, "outer": outer}
    strategy = build("fed-buff", options | ({"outer.momentum": momentum} if momentum else {}))
    sampler, asked = Buffered(at_once=0.5), {"sizes": [steps for *_, steps in clients], "fraction": 0.25, "seed": 0}
    models, velocity, most = [0.0], 0.0, 0
    for number in range(30):
        changes = []
        for client, late in sampler.behind(number, **asked).items():
            a, b, num_steps = clients[client]
            pull = 1 - (1 - 0.1 * a) ** num_steps
            changes.append(pull * (models[number - late] - b) / math.sqrt(1 + late))
            most = max(most, late)
        velocity = momentum * velocity + sum(changes) / len(changes)
        models.append(models[-1] - velocity)
    assert most > 2
    assert after(strategy, clients, rounds=30, workers=workers) == pytest.approx(models[-1], rel=1e-12)


def test_late_clients_are_recorded_and_not_played() -> None:
    clients = [(1.0, float(number), 1) for number in range(12)]
    strategy = build("fed-avg", {"clients": 12, "fraction": 0.25, "sampler": "first:over=2"})
    told: list[Mapping[str, Any]] = []
    found = after(strategy, clients, rounds=4, told=told)
    asked = {"sizes": [1] * 12, "fraction": 0.25, "seed": 0}
    late = [sorted(First(over=2.0).late(number, **asked)) for number in range(4)]
    assert told == [{"name": "late", "round": number + 1, "clients": who} for number, who in enumerate(late)]
    x = 0.0
    for number in range(4):
        x -= sum(0.1 * (x - client) for client in First(over=2.0).draw(number, **asked)) / 3
    assert found == pytest.approx(x, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"sampler.at_once": "1"},
            "100 clients that train at once and 10 that a round is made of need as many less one",
        ),
        ({"sampler": "buffered:at_once=0"}, "at_once must be above 0 and at most 1"),
        ({"sampler": "first:over=0.5"}, "over must be at least 1 and finite"),
        (
            {"sampler": "first:deadline=1", "aggregate": "krum:byzantine=1"},
            "krum.*needs 4 contributions, and there are 1; sampler=first:.*deadline=1.* leave its deadline out",
        ),
        ({"correction": "control-variates"}, "turns begin in other rounds than they end in"),
        ({"privacy": "central"}, "the clients of a round depend on who was quick before"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build("fed-buff", options)


def test_a_deadline_goes_with_what_joins_a_single_change() -> None:
    build("fed-avg", {"sampler": "first:deadline=1", "aggregate": "median"})
    build("fed-avg", {"sampler": "first", "aggregate": "krum:byzantine=1"})


def test_real_clients_take_their_time_themselves(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=r"draws how long simulated clients take.*--over and --round-deadline"):
        serve(__file__, strategy="fed-buff", tickets=tmp_path, address="127.0.0.1")
