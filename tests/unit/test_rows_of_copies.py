"""Over real sockets: a worker goes on with the rows of servers that die in the midst of what it asks them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from paceline.comm.alone import AloneCollective
from paceline.comm.servers.group import ServerGroup
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import Move, Moves, ServerAddress, connect_servers
from paceline.comm.wire import Keys
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.records import NullReporter
from paceline.server.admission import BulkSynchronous
from paceline.server.chains import Chain, Chains
from paceline.server.ranges import cut
from paceline.server.replication import Copied, HandedOver
from paceline.server.spec import OptimizerSpec, Push, ServerSpec
from paceline.server.tables.spec import RowGradients
from paceline.server.tables.table import Table
from tests.unit.one_table import NUM_ROWS, spec_of

EPOCH, SERVERS, STEPS, FOREVER = 1, 5, 40, 10**9
LAYOUT = by_group([TensorSpec("weight", (64,), torch.float32, 0)])
SGD = OptimizerSpec(torch.optim.SGD, {"lr": 1.0}, ({"lr": 1.0},), element_wise=True)


class Servers:
    """They run in threads, one of which ends where a server is to die."""

    def __init__(self, *, is_here: bool, replicas: int = SERVERS - 1) -> None:
        self.keys, self.moves, self.is_here = Keys.generate(), Moves(), is_here
        self.chains = Chains.first(["a"] * SERVERS, replicas=replicas, epoch=EPOCH)
        self.copied: list[Copied | HandedOver] = []
        self.services = [
            ParameterService(
                self.keys, host="127.0.0.1", index=index, epoch=EPOCH, reporter=NullReporter(),
                on_serving=lambda chain: self.moves.append(Move(chain.key_range, self.address(chain.head, chain))),
                on_told=self.copied.append,
            )
            for index in range(SERVERS)
        ]  # fmt: skip
        self.endpoints = {index: service.endpoint for index, service in enumerate(self.services)}
        pieces = cut(LAYOUT, num_servers=SERVERS, whole_tensors=False)
        for chain in self.chains.chains:
            for server in chain.servers:
                rule = BulkSynchronous(Membership(EPOCH, (0,)))
                spec = ServerSpec(LAYOUT, pieces[chain.key_range], SGD, rule, None)
                self.services[server].replicate(spec, chain, endpoints=self.endpoints)
        self.threads = [threading.Thread(target=service.serve) for service in self.services]
        for thread in self.threads:
            thread.start()

    def address(self, server: int, chain: Chain | None = None) -> ServerAddress:
        service = self.services[server]
        moved = {} if chain is None else {"epoch": chain.epoch, "copy_of": chain.key_range}
        return ServerAddress(service.endpoint, service.bell if self.is_here else None, **moved)

    def kill(self, server: int) -> None:
        self.services[server].stop()
        self.threads[server].join()
        self.chains, changed = self.chains.died(server)
        for chain in changed:
            self.change(chain)

    def change(self, chain: Chain) -> None:
        self.chains = self.chains.changed(chain)
        chain = self.chains.chains[chain.key_range]
        for each in (*chain.servers, chain.newcomer):
            if each is not None:
                self.services[each].reform(chain)

    def build(self, chain: Chain) -> None:
        assert chain.newcomer is not None
        spec = self.services[chain.servers[-1]].spec_of(chain.key_range)
        self.services[chain.newcomer].replicate_anew(spec, chain, endpoints=self.endpoints)

    def close(self) -> None:
        for service, thread in zip(self.services, self.threads, strict=True):
            service.stop()
            thread.join()


@contextmanager
def attached(servers: Servers) -> Iterator[ServerGroup]:
    group = connect_servers(
        servers.keys,
        servers=[servers.address(index) for index in range(SERVERS)],
        collective=AloneCollective(),
        configure=lambda *_: None,
        epoch=EPOCH,
        deadline_s=300.0,
        moves=servers.moves,
    )
    try:
        yield group
    finally:
        group.close()
        servers.close()


@pytest.mark.parametrize("is_here", [True, False], ids=["on lines", "on sockets"])
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "adagrad:lr=0.1"])
def test_rows_are_those_of_one_process_with_a_death_in_each_quarter(optimizer: str, is_here: bool) -> None:
    spec = spec_of(optimizer, num_rows=2**60)
    kills = {5 + 10 * quarter: server for quarter, server in enumerate((3, 0, 4, 1))}
    servers, twin = Servers(is_here=is_here), Table(spec)
    with attached(servers) as group:
        parameters, gradients = group.allocate(LAYOUT.num_bytes), group.allocate(LAYOUT.num_bytes)
        group.attach(LAYOUT, SGD, parameters, gradients, holds_rows=True)
        LAYOUT.views(gradients)[0].fill_(-1.0)
        tables, dying = group.open_tables([spec]), list[threading.Thread]()
        for step in range(STEPS):
            if step in kills:  # while this worker goes on, so that requests of any kind are lost
                dying.append(threading.Thread(target=servers.kill, args=(kills[step],)))
                dying[-1].start()
            keys = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(step))[:7] * 2**50
            rows = tables.read({0: keys}, is_fresh=False)[0]
            assert torch.equal(rows, twin.read(keys))
            given = RowGradients(keys, torch.cos(rows + step))
            tables.push([given], weight=1.0)
            assert min(group.exchange(Push(pause_at=FOREVER)).staleness) >= 0
            twin.update(given)
        for thread in dying:
            thread.join()
        assert_equal(tables.state(0), twin.state())
        group.pull()
        assert LAYOUT.views(parameters)[0].tolist() == [float(STEPS)] * 64
    assert servers.chains.dead == tuple(kills.values())
    assert not servers.moves


@pytest.mark.parametrize("is_here", [True, False], ids=["on lines", "on sockets"])
def test_what_was_to_become_a_copy_is_dropped_and_another_becomes_one(is_here: bool) -> None:
    """What is on its way to the one that was dropped goes by."""
    spec = spec_of("adagrad:lr=0.1", num_rows=2**60)
    servers, twin = Servers(is_here=is_here, replicas=1), Table(spec)
    with attached(servers) as group:
        parameters, gradients = group.allocate(LAYOUT.num_bytes), group.allocate(LAYOUT.num_bytes)
        group.attach(LAYOUT, SGD, parameters, gradients, holds_rows=True)
        tables = group.open_tables([spec])

        def train(seed: int) -> None:
            keys = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))[:7] * 2**50
            given = RowGradients(keys, torch.cos(tables.read({0: keys}, is_fresh=False)[0]))
            tables.push([given], weight=1.0)
            assert min(group.exchange(Push(pause_at=FOREVER)).staleness) >= 0
            twin.update(given)

        train(0)
        servers.kill(1)
        for lacking in list(servers.chains.lacking()):
            assert lacking.newcomer is not None
            newcomer, key_range = servers.services[lacking.newcomer], lacking.key_range
            servers.build(lacking)
            servers.change(lacking)
            train(key_range)
            why_not = "not tried yet"
            while why_not:  # what was sent to the one before may come to the next one
                assert why_not in ("not tried yet", "what it has taken has come late, of an attempt before")
                servers.change(replace(lacking, newcomer=None))
                before = servers.chains.chains[key_range]
                newcomer.reform(before)
                again = replace(before, newcomer=lacking.newcomer)
                servers.build(again)
                newcomer.reform(before)  # which comes late: what was built since stays
                servers.change(again)
                while not (told := [each for each in servers.copied if each.chain.version >= before.version]):
                    train(len(twin))
                assert told[0].chain == lacking
                why_not = told[0].why_not
                servers.copied.clear()
            servers.change(lacking.extended())
        assert [len(chain.servers) for chain in servers.chains.chains] == [2] * SERVERS
        for number, server in enumerate((3, 4), start=1):  # so that both new copies serve
            servers.kill(server)
            train(number)
        assert_equal(tables.state(0), twin.state())


def assert_equal(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items() if name != "updates")
