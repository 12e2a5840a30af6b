"""Workers that serve themselves from a lent shard: the server's own numbers, and a whole shard whoever is killed."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from paceline.comm.servers.lending import Lending, can_lend
from paceline.comm.servers.service import ParameterService
from paceline.comm.shared_memory import mutex
from paceline.comm.shared_memory.block import SharedBlock
from paceline.comm.shared_memory.mutex import MUTEX_BYTES, RobustMutex, all_of
from paceline.comm.wire import Keys
from paceline.records import NullReporter
from paceline.server.chains import Chains
from paceline.server.part import Part
from paceline.server.ranges import cut
from paceline.server.spec import OptimizerSpec, Push, ServerSpec
from tests.unit.lent_shards import ADAM, FOREVER, LAYOUT, SGD, Rule, Site, asp, bsp
from tests.unit.server_groups import EPOCH, attached

FORKS = multiprocessing.get_context("fork")  # children share the memory, and the test's functions


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("rule", [bsp, asp])
def test_updates_are_those_of_the_servers(rule: Rule, optimizer: OptimizerSpec, servers: int) -> None:
    site, twin = (Site(rule, 2, optimizer, servers=servers) for _ in range(2))
    site.step_by_message(0)
    twin.step_by_message(0)
    applied = []
    for clock in range(1, 9):
        twin.step_by_message(clock)
        if clock % 4 == 1:
            site.lend()
        for worker in site.workers:
            assert worker.push()
        for worker in site.workers:
            served = worker.take()
            assert served is not None
            assert [each.clock for each in served] == servers * [clock + 1]
        if clock % 4 == 0:
            applied += site.take_back()
    assert site.clocks == twin.clocks
    assert site.cores[0].iteration == twin.cores[0].iteration == applied[-1].iteration
    assert len(applied) == 16
    for own, other in zip([*site.shard, *site.parameters], [*twin.shard, *twin.parameters], strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_push_that_waits_for_others_goes_to_the_servers_when_one_takes_its_shard_back(servers: int) -> None:
    site = Site(bsp, 2, servers=servers)
    site.step_by_message(0)
    site.lend()
    first, second = site.workers
    assert first.push()
    assert not first.is_over
    site.lendings[-1].take_back(site.cores[-1].parts)
    assert first.is_over
    assert first.take() is None
    assert not second.push()
    site.take_back()
    assert site.push_by_message(0, 1) == []
    assert len(site.push_by_message(1, 1)) == 2 * servers


def test_a_push_is_over_when_all_servers_shards_have_it() -> None:
    site = Site(bsp, 2, servers=2)
    site.step_by_message(0)
    site.lend()
    first, _ = site.workers
    assert first.push()
    for each in site.each[1]:  # as the second worker does, who is slow
        assert not first.is_over
        assert each.may_push()
        each.push(None)
    assert first.is_over
    served = first.take()
    assert served is not None
    assert [each.iteration for each in served] == [2, 2]


def test_what_is_due_before_the_shard_is_taken_back_counts() -> None:
    site = Site(bsp, 2)
    site.step_by_message(0)
    site.lend()
    first, second = site.workers
    assert first.push()
    assert second.push()
    site.take_back()
    served = first.take()
    assert served is not None
    assert served[0].iteration == site.cores[0].iteration == 2


def test_the_last_update_is_the_servers() -> None:
    site = Site(asp, 1, max_updates=3)
    site.step_by_message(0)
    site.lend()
    assert [site.workers[0].push() for _ in range(3)] == [True, True, False]


def test_a_shard_is_not_lent_while_a_worker_waits() -> None:
    site = Site(bsp, 2)
    site.step_by_message(0)
    site.push_by_message(0, 1)
    assert not site.cores[0].is_quiet


def sequence(num_updates: int) -> list[list[Tensor]]:
    """What a lone worker's shard holds after each number of updates."""
    site = Site(asp, 1)
    found = [[]]
    for clock in range(num_updates):
        site.step_by_message(clock)
        found.append([tensor.clone() for tensor in site.shard])
    return found


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["before the kernel", "after the kernel", "once in force"])
def test_a_worker_killed_inside_leaves_the_shard_before_or_after(moment: str) -> None:
    site = Site(asp, 1)
    site.step_by_message(0)
    site.lend()
    (worker,), ((own,),) = site.workers, site.each
    assert worker.push()

    def push_and_die() -> None:
        if moment == "once in force":
            own._receive = die  # type: ignore[assignment,method-assign]
        for side in own._sides:
            step = side.step
            side.step = {"before the kernel": die, "after the kernel": lambda step=step: die(step())}.get(moment, step)
        worker.push()

    child = FORKS.Process(target=push_and_die)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    require_whole(site, num_updates=3 if moment == "once in force" else 2)


def test_a_worker_killed_at_any_moment_leaves_a_whole_shard() -> None:
    site = Site(asp, 1)
    site.step_by_message(0)
    site.lend()
    (worker,) = site.workers
    rng = random.Random(0)

    def push_on() -> None:
        for _ in range(100):
            worker.push()
            site.lendings[0].look()
        os._exit(0)

    for _ in range(10):
        child = FORKS.Process(target=push_on)
        child.start()
        time.sleep(rng.uniform(0.0, 0.02))
        with suppress(ProcessLookupError):
            os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
    require_whole(site, num_updates=None)


def require_whole(site: Site, *, num_updates: int | None) -> None:
    """The shard is as after that many updates, and can be updated."""
    count = site.lendings[0].iteration
    assert num_updates in (None, count)
    (worker,) = site.workers
    assert worker.push()
    site.take_back()
    assert site.cores[0].iteration == count + 1
    for own, expected in zip(site.shard, sequence(count + 1)[-1], strict=True):
        assert torch.equal(own, expected)


def test_a_lock_outlives_its_owner() -> None:
    block = SharedBlock.create(MUTEX_BYTES)
    mutex.prepare(block.tensor.data_ptr())
    lock = RobustMutex(block.tensor.data_ptr())

    def take_and_die() -> None:
        lock.__enter__()
        die()

    child = FORKS.Process(target=take_and_die)
    child.start()
    child.join()
    for _ in range(2):
        with lock:
            pass


def test_several_locks_are_taken_and_let_go_together() -> None:
    """Also where what is done under them fails."""
    blocks = [SharedBlock.create(MUTEX_BYTES) for _ in range(2)]
    for block in blocks:
        mutex.prepare(block.tensor.data_ptr())
    locks = [RobustMutex(block.tensor.data_ptr()) for block in blocks]

    def are_free() -> bool:
        return not any(mutex._at_once.pthread_mutex_trylock(lock._address) or lock.__exit__() for lock in locks)

    with suppress(RuntimeError), all_of(locks):
        taken = FORKS.Process(target=lambda: os._exit(are_free()))
        taken.start()
        taken.join()
        assert taken.exitcode == 0
        raise RuntimeError
    assert are_free()


@pytest.mark.parametrize("are_here", [(True, True), (True, False)], ids=["all here", "one elsewhere"])
def test_servers_lend_where_their_worker_borrows(are_here: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it does where all servers are on its host: a push is for all of them, or for none."""
    lend, lent = Lending.lend, []

    def noted(lending: Lending, parts: Sequence[Part], gradients: Mapping[int, Sequence[int]]) -> None:
        lent.append(lending)
        lend(lending, parts, gradients)

    monkeypatch.setattr(Lending, "lend", noted)
    with attached(LAYOUT, SGD, bsp(1), are_here=are_here) as group:
        for clock in range(3):
            assert group.exchange(Push(pause_at=FOREVER)).iteration == clock + 1
    # After the first push, which is a message; again where a server has taken its shards back from a worker that waits.
    assert len(set(map(id, lent))) == (2 if all(are_here) else 0)


def test_servers_with_copies_lend_nothing() -> None:
    """Copies would not hear of what workers change themselves."""
    chain = Chains.first(["here", "here"], replicas=1, epoch=EPOCH).chains[0]
    spec = ServerSpec(LAYOUT, cut(LAYOUT, num_servers=1, whole_tensors=False)[0], SGD, asp(2), None)
    assert can_lend(spec)
    keys = Keys.generate()
    for server in chain.servers:
        service = ParameterService(keys, host="127.0.0.1", index=server, epoch=EPOCH, reporter=NullReporter())
        service.replicate(spec, chain, endpoints={})
        assert service._copies[0]._lending is None
        service._close()
