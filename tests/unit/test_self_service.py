"""Workers that serve themselves from a lent shard: the server's own numbers, and a whole shard whoever is killed."""

import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from paceline.comm.servers.lending import Lending, can_lend
from paceline.comm.servers.loan import Loan
from paceline.comm.servers.self_service import SelfService
from paceline.comm.shared_memory import mutex
from paceline.comm.shared_memory.block import SharedBlock
from paceline.comm.shared_memory.mutex import MUTEX_BYTES, RobustMutex
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import Kind, Message
from paceline.server.actions import Send
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.ranges import cut
from paceline.server.server_core import ServerCore
from paceline.server.spec import OptimizerSpec, ServerSpec

SGD = OptimizerSpec(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ({"lr": 0.1}, {"lr": 0.02}), element_wise=True)
ADAM = OptimizerSpec(torch.optim.Adam, {"lr": 0.1}, ({"lr": 0.1}, {"lr": 0.02}), element_wise=True)
LAYOUT = by_group([TensorSpec("weight", (40, 9), torch.float32, 0), TensorSpec("bias", (7,), torch.float32, 1)])
FOREVER = 10**9
FORKS = multiprocessing.get_context("fork")  # children share the memory, and the test's functions


class Site:
    """A server's core, and the workers on its host."""

    def __init__(self, rule: AdmissionRule, optimizer: OptimizerSpec = SGD, *, max_updates: int | None = None) -> None:
        size = rule.members.size
        pieces = cut(LAYOUT, num_servers=1, whole_tensors=False)[0]
        spec = ServerSpec(LAYOUT, pieces, optimizer, rule, max_updates)
        assert can_lend(spec)
        self.core = ServerCore(index=0, epoch=1)
        self.core.configure(spec)
        self.gradients = [SharedBlock.create(LAYOUT.num_bytes) for _ in range(size)]
        self.parameters = [torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(size)]
        for rank in range(size):
            self.gradients[rank].tensor.view(torch.float32).copy_(torch.arange(LAYOUT.num_bytes // 4) * (rank + 1) / 7)
            message = Message(Kind.ATTACH, 1, sender=rank)
            memory = {"gradients": self.gradients[rank].tensor, "parameters": self.parameters[rank]}
            self.core.attach(message, **memory, is_beside=True)
        self.ask(Message(Kind.INITIALISE, 1))
        self.lending = Lending(spec)
        block = SharedBlock.open(self.lending.address)
        self.workers = [
            SelfService(
                Loan(block.tensor, LAYOUT, size),
                worker=rank,
                pieces=pieces,
                parameters=[piece.view(LAYOUT, self.parameters[rank]) for piece in pieces],
                spec=optimizer,
                open_gradients=lambda _: [
                    [piece.view(LAYOUT, own.tensor) for piece in pieces] for own in self.gradients
                ],
            )
            for rank in range(size)
        ]

    def ask(self, message: Message) -> list[Message]:
        return [action.message for action in self.core.receive(message, 0.0) if isinstance(action, Send)]

    def push_by_message(self, rank: int, clock: int) -> list[Message]:
        return self.ask(Message(Kind.EXCHANGE, 1, sender=rank, clock=clock, pause_at=FOREVER))

    def step_by_message(self, clock: int) -> None:
        for rank in range(len(self.workers)):
            self.push_by_message(rank, clock)

    def lend(self) -> None:
        assert self.core.is_quiet
        self.lending.lend(self.core.parts, [astuple(own.address) for own in self.gradients])

    @property
    def shard(self) -> list[Tensor]:
        """All that the server's shards hold."""
        own = [tensor for part in self.core.parts for tensor in part.shard.parameters]
        states = [part.shard.optimizer.state.values() for part in self.core.parts]
        return [*own, *(value for some in states for state in some for value in state.values())]


def bsp(size: int) -> AdmissionRule:
    return BulkSynchronous(Membership.first(size))


def asp(size: int) -> AdmissionRule:
    return StaleSynchronous(Membership.first(size), staleness=math.inf)


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("rule", [bsp, asp])
def test_updates_are_those_of_the_server(rule: Callable[[int], AdmissionRule], optimizer: OptimizerSpec) -> None:
    site, twin = Site(rule(2), optimizer), Site(rule(2), optimizer)
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
            assert served.clock == clock + 1
        if clock % 4 == 0:
            applied += site.lending.take_back(site.core.parts)
    assert [part.shard.clocks() for part in site.core.parts] == [part.shard.clocks() for part in twin.core.parts]
    assert site.core.iteration == twin.core.iteration == applied[-1].iteration
    assert len(applied) == 16
    for own, other in zip([*site.shard, *site.parameters], [*twin.shard, *twin.parameters], strict=True):
        assert torch.equal(own, other)


def test_a_push_that_waits_for_others_goes_to_the_server_when_that_takes_the_shard_back() -> None:
    site = Site(bsp(2))
    site.step_by_message(0)
    site.lend()
    first, second = site.workers
    assert first.push()
    assert not first.is_over
    site.lending.take_back(site.core.parts)
    assert first.is_over
    assert first.take() is None
    assert not second.push()
    assert site.push_by_message(0, 1) == []
    assert len(site.push_by_message(1, 1)) == 2


def test_what_is_due_before_the_shard_is_taken_back_counts() -> None:
    site = Site(bsp(2))
    site.step_by_message(0)
    site.lend()
    first, second = site.workers
    assert first.push()
    assert second.push()
    site.lending.take_back(site.core.parts)
    served = first.take()
    assert served is not None
    assert served.iteration == site.core.iteration == 2


def test_the_last_update_is_the_servers() -> None:
    site = Site(asp(1), max_updates=3)
    site.step_by_message(0)
    site.lend()
    assert [site.workers[0].push() for _ in range(3)] == [True, True, False]


def test_a_shard_is_not_lent_while_a_worker_waits() -> None:
    site = Site(bsp(2))
    site.step_by_message(0)
    site.push_by_message(0, 1)
    assert not site.core.is_quiet


def sequence(num_updates: int) -> list[list[Tensor]]:
    """What a lone worker's shard holds after each number of updates."""
    site = Site(asp(1))
    found = [[]]
    for clock in range(num_updates):
        site.step_by_message(clock)
        found.append([tensor.clone() for tensor in site.shard])
    return found


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["before the kernel", "after the kernel", "once in force"])
def test_a_worker_killed_inside_leaves_the_shard_before_or_after(moment: str) -> None:
    site = Site(asp(1))
    site.step_by_message(0)
    site.lend()
    (worker,) = site.workers
    assert worker.push()

    def push_and_die() -> None:
        if moment == "once in force":
            worker._receive = die  # type: ignore[assignment,method-assign]
        for side in worker._sides:
            step = side.step
            side.step = {"before the kernel": die, "after the kernel": lambda step=step: die(step())}.get(moment, step)
        worker.push()

    child = FORKS.Process(target=push_and_die)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    require_whole(site, num_updates=3 if moment == "once in force" else 2)


def test_a_worker_killed_at_any_moment_leaves_a_whole_shard() -> None:
    site = Site(asp(1))
    site.step_by_message(0)
    site.lend()
    (worker,) = site.workers
    rng = random.Random(0)

    def push_on() -> None:
        for _ in range(100):
            worker.push()
            site.lending.look()
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
    count = site.lending.iteration
    assert num_updates in (None, count)
    (worker,) = site.workers
    assert worker.push()
    site.lending.take_back(site.core.parts)
    assert site.core.iteration == count + 1
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
