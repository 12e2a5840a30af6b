"""What collectives hold on to: descriptors, memory, time; and that closing gives everything back."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm.base import Collective
from paceline.comm.process_group.collective import TorchCollective, connect_gloo
from paceline.comm.process_group.connections import listeners
from paceline.comm.shared_memory import futex
from paceline.comm.shared_memory.block import SharedBlock
from paceline.errors import DeadlineExceeded, PeerLost, UsageError
from tests.unit.collective_harness import World, caught, mapped_files

LARGE = 2**26
LATE_S = 3.0
"""So long that no delay of a busy machine comes near it."""


@pytest.fixture
def trio() -> Iterator[World]:
    with World("shared_memory", 3) as world:
        yield world


def test_close_gives_everything_back() -> None:
    with World("shared_memory", 2) as pair:
        for counts in pair.run(run_and_close):
            # The tensor's memory is still mapped, which takes no descriptor.
            assert counts == (0, "UsageError", 7.0)


def run_and_close(collective: Collective) -> tuple[int, str, float]:
    tensor = collective.allocate(400).view(torch.float32).fill_(7)
    collective.barrier()
    collective.close()
    collective.close()
    left = [fd for fd in os.listdir("/proc/self/fd") if "memfd:paceline" in _target(fd) or "pidfd" in _target(fd)]
    return len(left), caught(collective.barrier)[0], float(tensor[99])


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_memory_has_no_name(trio: World) -> None:
    trio.run(run_allocation)
    for pid in trio.pids():
        files = mapped_files(pid)
        assert any("memfd:paceline" in path for path in files)
        assert not any(path.startswith("/dev/shm") for path in files)


def run_allocation(collective: Collective) -> None:
    collective.allocate(2**20).fill_(1)


def test_time_and_bytes_are_accounted_for() -> None:
    with World("shared_memory", 2) as pair:
        waited, was_late = pair.run(run_timed)
    assert waited[0] > LATE_S / 3
    assert was_late[0] < LATE_S * 2 / 3
    # Each of two ranks reads half of the other's 4 MB, and writes half.
    assert waited[1] == was_late[1] == 4_000_000
    assert waited[2] > 0


def run_timed(collective: Collective) -> tuple[float, int, float]:
    memory = collective.allocate(4_000_000).view(torch.float32)
    collective.barrier()
    timing = collective.timing
    waiting_s, moved_bytes, communication_s = timing.waiting_s, timing.moved_bytes, timing.communication_s
    if collective.rank == 1:
        time.sleep(LATE_S)
    collective.all_reduce(memory).wait()
    return timing.waiting_s - waiting_s, timing.moved_bytes - moved_bytes, timing.communication_s - communication_s


def test_segment_of_a_process_that_is_gone() -> None:
    segment = SharedBlock.create(4096)
    segment.tensor[0] = 5
    again = SharedBlock.open(segment.address)
    assert again.tensor[0] == 5
    segment.close()
    with pytest.raises(PeerLost, match=f"process {os.getpid()}"):
        SharedBlock.open(segment.address)
    view = again.tensor[:1]
    again.close()
    assert view.item() == 5
    with pytest.raises(ValueError, match="at least one byte"):
        SharedBlock.create(0)


def test_futex_sleeps_until_woken_changed_or_late() -> None:
    segment = SharedBlock.create(4096)
    address = segment.tensor.data_ptr()
    assert timed(lambda: futex.wait(address, 1, 60.0)) < 30.0
    assert 0.05 < timed(lambda: futex.wait(address, 0, 0.1)) < 30.0
    has_woken = threading.Event()

    def keep_waking() -> None:
        while not has_woken.wait(0.1):  # the first wake may come before the wait
            futex.wake(address)

    waker = threading.Thread(target=keep_waking)
    waker.start()
    assert timed(lambda: futex.wait(address, 0, 60.0)) < 30.0
    has_woken.set()
    waker.join()
    with pytest.raises(OSError, match="futex wait"):
        futex.wait(address + 1, 0, 0.1)
    segment.close()


def timed(function: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def test_gloo_leaves_nothing_of_what_was_given_up() -> None:
    """An all-reduce that one of three never takes part in, and a message that never comes: the others' end at once, and
    their groups go, with threads and descriptors."""
    with World("gloo", 3) as world:
        late, lost, _ = world.run(run_given_up)
    assert late == ("DeadlineExceeded", 0, 0)
    assert lost == ("PeerLost", 0, 0)


def run_given_up(collective: Collective) -> tuple[str, int, int] | None:
    if collective.rank == 2:
        time.sleep(LATE_S)  # alive, and silent
        return None
    gc.disable()  # which comes rarely where much is loaded
    collective.set_deadline(0.2 if collective.rank == 0 else 60.0)
    tensor = torch.zeros(8)
    message = collective.recv(tensor.clone(), source=2)
    work = collective.all_reduce(tensor)
    error, _, _ = caught(work.wait)
    collective.close()
    del work, message
    until_s = time.monotonic() + 30
    while num_threads_of_gloo() and time.monotonic() < until_s:
        time.sleep(0.05)
    return error, num_threads_of_gloo(), len(listeners())


def test_gloo_waits_for_no_message_that_broke_off() -> None:
    """A host vanishes when a part of what it sends is here: gloo's operation goes on until its time-out, and whoever
    closes the collective goes on at once."""
    with World("gloo", 2) as world:
        world.run(run_nothing)
        world.start(run_broken_off, world.pids()[1])
        error, is_whole, took_s = world.result(0)
    assert (error, is_whole) == ("PeerLost", False)
    assert took_s < LATE_S


def run_nothing(collective: Collective) -> None:
    collective.barrier()


def run_broken_off(collective: Collective, sender: int) -> tuple[str, bool, float]:
    assert isinstance(collective, TorchCollective)
    tensor = torch.full((LARGE,), float(collective.rank))
    options = dist.BroadcastOptions()
    options.rootRank = 1
    # As an all-reduce has it, but for the size of its messages: large enough that this one is seen on its way.
    work = collective._calls.submit("it", lambda: collective._group.broadcast([tensor], options), num_bytes=0)
    if collective.rank == 0:
        while not tensor[0]:
            work.poll()  # which starts it when the other rank has come
        os.kill(sender, signal.SIGSTOP)
        collective.lose("its host is gone")
    error, _, _ = caught(work.wait)
    is_whole = bool(tensor[-1])
    took_s = timed(collective.close)
    return error, is_whole, took_s


def num_threads_of_gloo() -> int:
    num = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # it has just ended
            num += "gloo" in Path(f"/proc/self/task/{task}/comm").read_text()
    return num


def test_gloo_needs_an_address_of_this_host() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1.*127\.0\.0\.1"):
        connect_gloo(dist.HashStore(), rank=0, size=1, address="192.0.2.1")


def test_gloo_ranks_that_do_not_come() -> None:
    with pytest.raises(DeadlineExceeded, match="not all of 2 ranks"):
        connect_gloo(dist.HashStore(), rank=0, size=2, address="127.0.0.1", deadline_s=0.5)
