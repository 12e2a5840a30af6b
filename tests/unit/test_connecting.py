"""How ranks find one another: what carries them, who is missing, who died, and how an abort ends the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from paceline.comm.alone import AloneCollective
from paceline.comm.connecting import Site, connect, connect_members, needs_store, transport
from paceline.comm.hierarchical import collective as hierarchical
from paceline.comm.meeting import exchange
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.errors import Aborted, DeadlineExceeded, PeerLost, UsageError
from tests.forks import FORKS
from tests.unit.collective_harness import MEETING_S, later

SOON_S = MEETING_S / 4  # of a busy machine


def members(hosts: str, gpus: Sequence[str | None]) -> list[Site]:
    return [Site(host, gpu, BlockAddress(1, 2, 3, 4)) for host, gpu in zip(hosts, gpus, strict=True)]


@pytest.mark.parametrize(
    ("hosts", "gpus", "chosen"),
    [
        ("a", ["x"], "none"),
        ("aa", ["x", "y"], "nccl"),
        ("ab", ["x", "y"], "nccl"),
        ("aa", ["x", "x"], "shared memory"),
        ("aa", [None, None], "shared memory"),
        ("ab", [None, None], "gloo"),
        ("aba", [None, None, None], "hierarchical"),
    ],
)
def test_what_carries_a_group(hosts: str, gpus: Sequence[str | None], chosen: str) -> None:
    assert transport(members(hosts, gpus)) == chosen
    assert needs_store(members(hosts, gpus)) == (chosen in ("nccl", "gloo", "hierarchical"))


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_a_rank_without_a_gpu_is_named(hosts: str) -> None:
    memory = SharedMemoryCollective.prepare()
    with pytest.raises(UsageError, match="no GPU on rank 1, but on others"):
        connect_members(members(hosts, ["x", None, "y"]), rank=0, memory=memory, deadline_s=MEETING_S)
    assert not memory.buffer, "closed"


def test_a_shared_gpu_means_one_host() -> None:
    with pytest.raises(UsageError, match="share a GPU must be on one host"):
        transport(members("aab", ["x", "x", "y"]))


def test_one_rank_needs_no_store() -> None:
    store: Any = None
    assert isinstance(connect(store, rank=0, size=1, deadline_s=1.0), AloneCollective)


def test_each_rank_hears_what_each_says() -> None:
    store = dist.HashStore()
    heard: dict[int, list[str]] = {}

    def speak(rank: int) -> None:
        heard[rank] = exchange(store, "" if rank else "first", rank=rank, size=3, deadline_s=MEETING_S)

    threads = [threading.Thread(target=speak, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {rank: ["first", "", ""] for rank in range(3)}


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("rank 1", "")
    with pytest.raises(DeadlineExceeded, match=r"rank 2 has not come to the process group within 0.1 s"):
        exchange(store, "", rank=0, size=3, deadline_s=0.1)


def test_a_dead_rank_0_takes_the_store_with_it() -> None:
    patience = timedelta(seconds=MEETING_S)
    ours, theirs = FORKS.Pipe()
    first = FORKS.Process(target=_keep_a_store, args=(theirs,), daemon=True)
    first.start()
    store = dist.TCPStore("127.0.0.1", ours.recv(), is_master=False, timeout=patience)
    store.set("rank 0", "")
    later(0.3, first.kill)
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 is lost"):
        exchange(store, "", rank=1, size=3, deadline_s=MEETING_S)
    assert time.monotonic() - began_s < SOON_S


def _keep_a_store(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    time.sleep(2 * MEETING_S)


def test_an_abort_ends_the_wait_for_others() -> None:
    aborted = threading.Event()

    def check() -> None:
        if aborted.is_set():
            raise Aborted("another member failed")

    later(0.3, aborted.set)
    with pytest.raises(Aborted, match="another member failed"):
        exchange(dist.HashStore(), "", rank=0, size=2, deadline_s=None, check=check)


def test_a_death_before_all_have_met_is_noticed_at_once() -> None:
    ours, theirs = FORKS.Pipe()
    other = FORKS.Process(target=_prepare_and_linger, args=(theirs,), daemon=True)
    other.start()
    memory = SharedMemoryCollective.prepare()
    known = [Site("a", None, memory.address), Site("a", None, ours.recv())]
    later(0.3, other.kill)
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        connect_members(known, rank=0, memory=memory, deadline_s=MEETING_S)
    assert time.monotonic() - began_s < SOON_S


def _prepare_and_linger(connection: Connection) -> None:
    memory = SharedMemoryCollective.prepare()
    connection.send(memory.address)
    time.sleep(2 * MEETING_S)


def test_a_hierarchical_collective_that_fails_half_way_closes_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Group:
        def __init__(self, size: int) -> None:
            self.size = size
            self.barrier = lambda: None

        def close(self) -> None:
            closed.append(self.size)

    def fail(**_: Any) -> None:
        raise PeerLost("rank 1 is lost")

    monkeypatch.setattr(hierarchical, "connect_gloo", lambda store, *, size, **_: Group(size))
    monkeypatch.setattr(hierarchical, "HostShares", fail)
    with pytest.raises(PeerLost):
        hierarchical.HierarchicalCollective(
            dist.HashStore(), rank=0, hosts=[[0, 1], [2, 3]], address="127.0.0.1", deadline_s=MEETING_S
        )
    assert closed == [2, 4], "the latest first"
