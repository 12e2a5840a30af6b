"""What a probe finds out about the ways between hosts: pairs, shares of a link, exchanges with servers."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.base import TableStore
from paceline.comm.wire import Keys
from paceline.probing import row_requests
from paceline.probing import traffic as network
from paceline.probing.echo import Echo
from paceline.probing.exchanging import ExchangeCost, Exchanges
from paceline.probing.sharing import answered, connected, logarithms_of_shares, measure_unevenness, unevenness_of
from paceline.probing.timing import CacheEmptier, mean_s
from paceline.records import NullReporter
from paceline.server.tables.spec import RowGradients
from tests.threads import running, started_since


@given(st.integers(2, 24))
def test_every_pair_meets_once_and_nobody_is_in_two_pairs_at_a_time(count: int) -> None:
    found = network.rounds(count)
    pairs = [pair for each in found for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for each in found:
        players = [player for pair in each for player in pair]
        assert len(set(players)) == len(players)
    assert len(found) == count - 1 + count % 2


def test_shares_by_hand() -> None:
    assert logarithms_of_shares([10, 10, 10]) == [0.0, 0.0, 0.0]
    assert logarithms_of_shares([20, 0, 10]) == pytest.approx([math.log(2), math.log(0.02), 0.0])


def test_too_few_pieces_say_nothing() -> None:
    assert unevenness_of([[100, 50], [50, 100]]) == pytest.approx(math.log(2) / 2, rel=1e-6)
    assert unevenness_of([[100, 50], [10, 9]]) is None


@pytest.mark.slow
def test_connections_to_one_listener_are_all_counted() -> None:
    keys = Keys.generate()
    echo = Echo(keys, host="127.0.0.1")
    try:
        assert 0 <= measure_unevenness(keys, echo.endpoint, name="it") < 3
        with connected(keys, echo.endpoint, ["one", "two"]) as callers:
            assert min(answered(callers)) > 0
        assert answered([]) == []  # of the host that all others push to
    finally:
        echo.close()


def test_two_ranks_exchange_with_each_others_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at the same time, as in a run whose servers are on workers' hosts; nothing of it stays."""
    monkeypatch.setattr(row_requests, "_ROUND_S", 0.0)
    keys = Keys.generate()
    mine, theirs = SimpleQueue[str](), SimpleQueue[str]()
    before = running()

    def swap_with(outgoing: SimpleQueue[str], incoming: SimpleQueue[str], text: str) -> str:
        outgoing.put(text)
        return incoming.get(timeout=60)

    def one(outgoing: SimpleQueue[str], incoming: SimpleQueue[str]) -> ExchangeCost:
        swap = partial(swap_with, outgoing, incoming)
        return Exchanges(swap, keys, "127.0.0.1", NullReporter(), num_sharing=2).measure()

    with ThreadPoolExecutor(2) as pool:
        costs = [future.result() for future in (pool.submit(one, mine, theirs), pool.submit(one, theirs, mine))]
    for cost in costs:
        assert 0 < cost.request_core_s < 1.0
        assert 0 < cost.request_s < 1.0
        assert cost.bytes_per_core_s > 1e6
        assert 0 < cost.row_request_s < 1.0
        assert 0 < cost.row_request_core_s < 1.0
        assert cost.row_request_variation > 0
    assert not started_since(before)


def test_a_mean_leaves_the_extremes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten times the shortest and the longest: a hiccup of the machine is not what a message takes."""
    ends_s = accumulate([0.0, 30.0, *[1.0] * 4, *[3.0] * 4])
    now_s = 0.0

    def take_time() -> None:
        nonlocal now_s
        now_s = next(ends_s)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    assert mean_s(take_time, 10) == pytest.approx(2.0)


def test_a_round_with_rows_is_timed_by_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks for the same rows, 3 ms, gives gradients of them, 4 ms, and exchanges, 5 ms; every second one takes
    twice as long. Emptying caches and the pauses between rounds do not count."""
    now_s, asked, begins_s = 0.0, list[str](), list[float]()

    def take(duration_s: float) -> None:
        nonlocal now_s
        now_s += duration_s

    class Tables:
        def read(self, wanted: dict[int, Tensor], *, is_fresh: bool) -> None:
            begins_s.append(now_s)
            asked.append(f"read {len(wanted[0])} {is_fresh}")
            take(3e-3 * factor())

        def push(self, gradients: list[RowGradients], *, weight: float) -> None:
            asked.append(f"push {len(gradients[0].keys)}")
            take(4e-3 * factor())

    class Emptier:
        def __call__(self) -> None:
            take(0.03)

    def factor() -> int:
        return 1 + len(begins_s) % 2

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(time, "sleep", take)
    tables, emptier = cast(TableStore, Tables()), cast(CacheEmptier, Emptier())
    rounds = row_requests.RowRounds(tables, lambda: take(5e-3 * factor()), emptier)
    rounds.warm_up()
    assert set(asked) == {"read 32 False", "push 32"}
    begins_s.clear()
    times = rounds.times()
    assert len(begins_s) == row_requests.NUM_ROUNDS
    assert [after - before for before, after in pairwise(begins_s)] == pytest.approx([0.06] * (len(begins_s) - 1))
    assert times.round_s == pytest.approx(12e-3 * 1.5)
    sigma = math.log(2) / 2  # of times that are half t, half 2 t
    assert times.variation == pytest.approx(math.sqrt(math.exp(sigma**2) - 1))


def test_a_round_that_takes_long_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept_s = 0.0, list[float]()

    def take(duration_s: float) -> None:
        nonlocal now_s
        now_s += duration_s

    def sleep(duration_s: float) -> None:
        slept_s.append(duration_s)
        take(duration_s)

    class Tables:
        def read(self, wanted: dict[int, Tensor], *, is_fresh: bool) -> None:
            take(0.2)

        def push(self, gradients: list[RowGradients], *, weight: float) -> None:
            take(0.2)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(time, "sleep", sleep)
    tables, emptier = cast(TableStore, Tables()), cast(CacheEmptier, lambda: take(0.01))
    rounds = row_requests.RowRounds(tables, lambda: take(0.2), emptier)
    assert rounds.times().round_s == pytest.approx(0.6)
    assert slept_s == pytest.approx([0.05] + [0.005] * (row_requests.NUM_ROUNDS - 1))


def test_one_request_far_from_all_others_counts_for_little() -> None:
    even = [1e-3] * 50
    assert row_requests.variation_of([even, [2e-3] * 50]) == 0.0  # kinds may take what they want
    assert row_requests.variation_of([[*even[:-1], 1e-1], even]) < 0.6
