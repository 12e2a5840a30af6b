"""Connections that tell who is gone and who takes part in what, among threads of one process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import pytest

from paceline.comm.process_group.peer_watch import ADDRESS_BYTES, PeerWatch
from paceline.errors import DeadlineExceeded


class AllGather:
    """What the ranks exchange their addresses by."""

    def __init__(self, size: int) -> None:
        self.rows = [b""] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, row: bytes) -> Sequence[bytes]:
        self.rows[rank] = row
        self._barrier.wait(60)
        return self.rows


def meet(
    size: int, *, absent: int = -1, stranger: bool = False, deadline_s: float = 60.0
) -> list[PeerWatch | Exception]:
    """Every rank's watch, or why it got none; `absent` gives its address but connects to nobody."""
    gather = AllGather(size)
    found: list[PeerWatch | Exception] = [RuntimeError("nothing")] * size

    def run(rank: int) -> None:
        def exchange(row: bytes) -> Sequence[bytes]:
            rows = gather.exchange(rank, row)
            if rank == absent:
                raise RuntimeError("absent")
            if stranger and rank == 1:
                port = int.from_bytes(rows[0][40:42], "little")
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall((2).to_bytes(4, "little") + bytes(16))
            return rows

        try:
            found[rank] = PeerWatch.meet(exchange, rank=rank, address="127.0.0.1", deadline_s=deadline_s)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def watches(size: int, *, stranger: bool = False) -> list[PeerWatch]:
    found = [watch for watch in meet(size, stranger=stranger) if isinstance(watch, PeerWatch)]
    assert len(found) == size
    return found


def test_an_address_has_a_fixed_length() -> None:
    rows: list[bytes] = []

    def exchange(row: bytes) -> Sequence[bytes]:
        rows.append(row)
        return rows

    watch = PeerWatch.meet(exchange, rank=0, address="127.0.0.1", deadline_s=60.0)
    assert [len(row) for row in rows] == [ADDRESS_BYTES]
    assert watch.missing(1) == []
    watch.close()


def test_who_said_nothing_is_missing() -> None:
    first, second, third = watches(3)
    assert first.missing(1) == [1, 2]
    second.tell(1, "barrier")
    second.tell(4, "all_reduce")
    third.tell(3, "barrier")
    while first.missing(3):
        first.wait(5.0)
        first.look()
    assert first.missing(4) == [2]
    assert first.peers[1].calls == {1: "barrier", 4: "all_reduce"}
    assert first.peers[2].departure is None
    for watch in (first, second, third):
        watch.close()


def test_who_leaves_says_why_and_who_ends_does_not() -> None:
    first, second, third = watches(3)
    second.leave(7, "the disk is full")
    second.close()
    third.close()
    while first.peers[1].departure is None or first.peers[2].departure is None:
        first.wait(5.0)
        first.look()
    assert first.peers[1].departure == "it left (the disk is full)"
    assert first.peers[1].num_completed == 7
    assert "its process ended" in first.peers[2].departure
    first.tell(8, "barrier")  # to nobody, without an error
    first.close()
    first.close()


def test_strangers_are_turned_away() -> None:
    first, second, third = watches(3, stranger=True)
    third.tell(2, "barrier")
    while first.missing(2) == [1, 2]:
        first.wait(5.0)
        first.look()
    assert first.missing(2) == [1]
    for watch in (first, second, third):
        watch.close()


def test_who_does_not_read_holds_nobody_up() -> None:
    first, second = watches(2)
    for number in range(1, 20_000):
        first.tell(number, 1000 * "x")
    assert first.peers[1].is_deaf
    second.look()
    assert not second.missing(100)
    first.close()
    second.close()


def test_who_does_not_connect_is_named() -> None:
    first = meet(3, absent=2, deadline_s=4.0)[0]
    assert isinstance(first, DeadlineExceeded)
    with pytest.raises(DeadlineExceeded, match="rank 2 has not connected"):
        raise first
