"""Connections that share simulated links unevenly."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engines.virtual.network.links import WINDOW_BYTES, Network
from tests.unit.network_bench import B, Bench, M


def _busy(network: Network) -> list[tuple[tuple[int, int, bool], Any]]:
    return [(name, connection) for name, connection in network._connections.items() if connection.waiting]


def test_connections_share_a_link_in_proportion_to_their_windows() -> None:
    """While all of them have something to send: what each got when the first was through."""
    bench = Bench(5, unevenness=0.8)
    for sender in range(1, 5):
        bench.network.send(sender, 0, M, bench.timeline.stop)
    windows = {name[0]: connection.window_bytes for name, connection in bench.network._connections.items()}
    assert max(windows.values()) > 1.5 * min(windows.values())
    first = max(windows, key=windows.__getitem__)
    bench.timeline.run()  # until the first one's message has arrived
    left = {name[0]: c.waiting[0].left_bytes + c.under_way_bytes for name, c in _busy(bench.network)}
    for sender, left_bytes in left.items():
        assert (M - left_bytes) / M == pytest.approx(windows[sender] / windows[first], rel=0.1)
    assert [bench.run() for _ in range(3)][-1] == pytest.approx(4 * M / B, rel=1e-6)  # and none of the link is lost


def test_uneven_shares_make_what_needs_all_senders_late() -> None:
    """Servers update a piece when its last gradient has come, though the link is full all the time."""

    def took_s(unevenness: float, seed: int = 0) -> tuple[float, float]:
        bench = Bench(9, unevenness=unevenness, seed=seed, chunk_bytes=2**16)
        for sender in range(1, 9):
            for piece in range(20):
                bench.send(sender, 0, 2**20, (sender, piece))
        end_s = bench.run()
        return max(time_s for (_, piece), time_s in bench.arrived.items() if piece == 0), end_s  # type: ignore[misc]

    first_s, all_s = 8 * 2**20 / B, 160 * 2**20 / B
    assert took_s(0.0) == pytest.approx((first_s, all_s), rel=0.02)
    even_s, _ = took_s(1e-6)
    assert first_s <= even_s <= first_s + 8 * WINDOW_BYTES / B  # some are a window ahead of others
    for seed in range(5):
        late_s, end_s = took_s(0.7, seed)
        assert late_s > 1.3 * even_s
        assert end_s == pytest.approx(all_s, rel=1e-6)
    assert took_s(0.7) == took_s(0.7) != took_s(0.7, seed=1)


def test_a_connection_that_was_idle_begins_anew() -> None:
    bench = Bench(2, unevenness=0.5)
    windows: list[float] = []

    def send() -> None:
        bench.send(0, 1, 1e6, len(windows))
        (connection,) = bench.network._connections.values()
        windows.append(connection.window_bytes)

    for time_s in (0.0, 0.1, 1.0):  # 8 ms each; hardly idle before the second, for long before the third
        bench.at(time_s, send)
    bench.run()
    assert windows[0] == windows[1] != windows[2]


@pytest.mark.parametrize("size", [3, 6, 7])
def test_idleness_is_noticed_after_messages_of_any_size(size: int) -> None:
    """Parts of a tensor are fractions of bytes, whose sums do not come back to 0."""
    bench = Bench(2, unevenness=0.5)
    windows = set[float]()

    def send() -> None:
        bench.send(0, 1, 102_400_004 / size, "large")
        bench.send(0, 1, 4096 / size, "small")
        windows.update(connection.window_bytes for connection in bench.network._connections.values())

    for number in range(10):
        bench.at(10.0 * number, send)
    bench.run()
    assert len(windows) >= 8  # some may be the least
