"""Real services, over sockets and lines: a server joins, is given copies, and serves key ranges of living servers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import pytest
import torch

from paceline.comm.alone import AloneCollective
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import Move, Moves, ServerAddress, connect_servers
from paceline.comm.wire import Keys
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.records import NullReporter
from paceline.server.admission import BulkSynchronous
from paceline.server.chains import Chain, Chains, Handover
from paceline.server.ranges import cut
from paceline.server.replication import Copied, HandedOver
from paceline.server.spec import OptimizerSpec, Push, ServerSpec

EPOCH, FOREVER, PATIENCE_S = 1, 10**9, 120.0
LAYOUT = by_group([TensorSpec("weight", (64,), torch.float32, 0)])
MOMENTUM = OptimizerSpec(torch.optim.SGD, {"lr": 1.0, "momentum": 0.5}, ({"lr": 1.0, "momentum": 0.5},), True)


@final
class Servers:
    """Services in threads of this process, and a launcher's knowledge of them."""

    def __init__(self, *, has_lines: bool) -> None:
        self.keys, self.moves, self.has_lines = Keys.generate(), Moves(), has_lines
        self.chains = Chains.first(["a", "a"], replicas=1, epoch=EPOCH)
        self.told: queue.Queue[Chain | Copied | HandedOver] = queue.Queue()
        self.services: list[ParameterService] = []
        self.threads: list[threading.Thread] = []
        for _ in range(2):
            self.add()
        ranges = cut(LAYOUT, num_servers=2, whole_tensors=False)
        rule = BulkSynchronous(Membership(EPOCH, (0,)))
        for chain in self.chains.chains:
            spec = ServerSpec(LAYOUT, ranges[chain.key_range], MOMENTUM, rule, None, outlives_workers=True)
            for server in chain.servers:
                self.services[server].replicate(spec.anew(), chain, endpoints=self.endpoints)

    @property
    def endpoints(self) -> dict[int, str]:
        return {index: service.endpoint for index, service in enumerate(self.services)}

    def add(self) -> int:
        number = len(self.services)
        service = ParameterService(
            self.keys,
            host="127.0.0.1",
            index=number,
            epoch=EPOCH,
            reporter=NullReporter(),
            on_serving=self.told.put,
            on_told=self.told.put,
        )
        self.services.append(service)
        self.threads.append(threading.Thread(target=service.serve))
        self.threads[-1].start()
        return number

    def address(self, chain: Chain) -> ServerAddress:
        service = self.services[chain.head]
        copy_of = chain.key_range if chain.head != chain.key_range else None
        return ServerAddress(service.endpoint, service.bell if self.has_lines else None, chain.epoch, copy_of)

    def change(self, chain: Chain) -> None:
        before = self.chains.chains[chain.key_range]
        self.chains = self.chains.changed(chain)
        chain = self.chains.chains[chain.key_range]
        for server in {*before.servers, before.newcomer, *chain.servers, chain.newcomer} - {None}:
            self.services[server].reform(chain, endpoints=self.endpoints)  # type: ignore[index]

    def wait_for(self, what: object) -> None:
        while self.told.get(timeout=PATIENCE_S) != what:
            pass

    def hand_over(self, key_range: int, to: int, *, is_told: bool = True) -> None:
        """`is_told`: the worker hears of it."""
        chain = replace(self.chains.chains[key_range], handover=Handover(to, 1))
        self.change(chain)
        self.wait_for(HandedOver(chain))
        self.change(after := chain.handed_over())
        self.wait_for(after)
        if is_told:
            self.moves.append(Move(key_range, self.address(after)))

    def copy_to(self, server: int, key_range: int) -> None:
        chain = replace(self.chains.chains[key_range], newcomer=server)
        spec = self.services[chain.servers[-1]].spec_of(key_range)
        self.services[server].replicate_anew(spec, chain, endpoints=self.endpoints)
        self.change(chain)
        self.wait_for(Copied(chain))
        self.change(chain.extended())

    def stop(self) -> None:
        for service, thread in zip(self.services, self.threads, strict=True):
            service.stop()
            thread.join()


@contextmanager
def servers(*, has_lines: bool) -> Iterator[Servers]:
    made = Servers(has_lines=has_lines)
    try:
        yield made
    finally:
        made.stop()


@final
class Training:
    """One worker, beside the same updates without servers."""

    def __init__(self, group: Servers) -> None:
        self.store = connect_servers(
            group.keys,
            servers=[group.address(chain) for chain in group.chains.chains],
            collective=AloneCollective(),
            configure=lambda *_: None,
            epoch=EPOCH,
            deadline_s=PATIENCE_S,
            moves=group.moves,
        )
        parameters, gradients = (self.store.allocate(LAYOUT.num_bytes) for _ in range(2))
        (self.own,), (self.gradient,) = LAYOUT.views(parameters), LAYOUT.views(gradients)
        self.like = torch.nn.Parameter(torch.linspace(-1, 1, 64))
        self.optimizer = torch.optim.SGD([self.like], lr=1.0, momentum=0.5)
        self.own.copy_(self.like.detach())
        self.store.attach(LAYOUT, MOMENTUM, parameters, gradients)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.like.grad = torch.cos(self.like.detach())
        self.gradient.copy_(self.like.grad)
        self.store.exchange(Push(pause_at=FOREVER))
        self.optimizer.step()
        assert self.own.equal(self.like.detach())


@contextmanager
def training(*, has_lines: bool) -> Iterator[tuple[Servers, Training]]:
    with servers(has_lines=has_lines) as group:
        made = Training(group)
        try:
            yield group, made
        finally:
            made.store.close()


@pytest.mark.parametrize("has_lines", [True, False], ids=["beside", "apart"])
def test_key_ranges_go_to_a_server_that_joins_and_back(has_lines: bool) -> None:
    with training(has_lines=has_lines) as (group, worker):
        worker.step()
        group.hand_over(0, to=1)
        worker.step()
        group.hand_over(0, to=0)
        worker.step()
        joined = group.add()
        for key_range in range(2):
            group.copy_to(joined, key_range)
            worker.step()
            group.hand_over(key_range, to=joined)
            worker.step()
        for key_range in range(2):
            for server in range(2):
                group.change(group.chains.chains[key_range].without(server))
            worker.step()
        group.copy_to(1, 0)
        group.hand_over(0, to=1)
        worker.step()
        assert [chain.servers for chain in group.chains.chains] == [(1, 2), (2,)]
        state = worker.store.optimizer_state()
        assert state["0.momentum_buffer"].equal(worker.optimizer.state[worker.like]["momentum_buffer"])


@pytest.mark.parametrize("has_lines", [True, False], ids=["beside", "apart"])
def test_a_worker_asks_the_same_server_that_has_had_the_key_range_handed_back(has_lines: bool) -> None:
    """Before it has heard of the other one, as where that has died just then: its connection is still there."""
    with training(has_lines=has_lines) as (group, worker):
        for _ in range(5):
            worker.step()
            group.hand_over(0, to=1, is_told=False)
            group.hand_over(0, to=0)
        worker.step()


def test_what_is_asked_while_a_server_hands_over_is_done_when_that_is_called_off() -> None:
    """The launcher asks, too, and may be heard before its word that it is called off."""
    with servers(has_lines=False) as group:
        chain = replace(group.chains.chains[0], handover=Handover(1, 1))
        group.change(chain)
        group.wait_for(HandedOver(chain))
        said: queue.Queue[int] = queue.Queue()
        asking = threading.Thread(target=lambda: said.put(group.services[0].expect(0, worker=0)))
        asking.start()
        with pytest.raises(queue.Empty):
            said.get(timeout=0.3)
        group.change(replace(chain, handover=None))
        assert said.get(timeout=PATIENCE_S) == 0
        asking.join()
