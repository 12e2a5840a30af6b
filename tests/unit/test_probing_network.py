"""What a probe finds out about the ways between hosts: pairs, shares of a link, exchanges with servers."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.wire import Keys
from paceline.probing import traffic as network
from paceline.probing.echo import Echo
from paceline.probing.exchanging import ExchangeCost, Exchanges
from paceline.probing.sharing import answered, connected, logarithms_of_shares, measure_unevenness, unevenness_of
from paceline.probing.timing import mean_s
from paceline.records import NullReporter
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


def test_two_ranks_exchange_with_each_others_servers() -> None:
    """Both at the same time, as in a run whose servers are on workers' hosts; nothing of it stays."""
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
