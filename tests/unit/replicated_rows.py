"""Workers that read and push rows of tables of servers with copies, and what has to be of them in the end."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from paceline.messages import Kind, Message, split_frames
from paceline.server.actions import Send
from paceline.server.conversation import Conversation
from paceline.server.spec import Push
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.dividing import joined
from paceline.server.tables.spec import RowGradients, TableSpec
from tests.unit.one_table import spec_of
from tests.unit.replicated_servers import (
    EPOCH,
    FOREVER,
    HOSTS,
    LAYOUT,
    PLAIN,
    Death,
    Net,
)

NUM_WORKERS, NUM_STEPS, NUM_KEYS = 3, 4, 9
EXACT = [spec_of("sgd:lr=1", std=0.0)]
TABLES = [
    spec_of("adagrad:lr=0.1"),
    spec_of("adam:lr=0.1", num_rows=2**60, dtype=torch.bfloat16, min_count=2),
    spec_of("sgd:lr=0.5", max_rows=6),
]
QUICK = settings(max_examples=20, deadline=None)
Thread = Iterator[tuple[Conversation, Iterable[Send]]]
"""What a worker does: asks, and goes on once it is answered."""


class RowsNet(Net):
    """Every worker reads rows of tables, and pushes gradients that depend on them."""

    num_steps = NUM_STEPS

    def __init__(self, rule: str, specs: Sequence[TableSpec], *, deaths: Iterable[Death], **about: Any) -> None:
        self.rows_bytes = [0, 0]
        """Of updates, as a head tells them, and as workers push them."""
        super().__init__(rule, num_workers=NUM_WORKERS, spec=PLAIN, deaths=[], **about)
        self.specs = specs
        self.tables = [
            TableClient(specs, rank=rank, epoch=EPOCH, num_servers=len(self.hosts)) for rank in range(NUM_WORKERS)
        ]
        self.do_all([self.opened()])
        self.deaths = {death.server: death for death in deaths}

    def put(self, source: str, target: str, key_range: int, item: Any) -> None:
        if "launcher" not in (source, target):
            message = Message.decode(item, epoch=None)
            if message.kind is Kind.REPLICATE and message.body["what"] == "rows":
                self.rows_bytes[0] += message.tensor_bytes
            elif message.kind is Kind.EXCHANGE and "rows" in message.body:
                own = 0 if self.is_beside(int(source[1:]), int(target[1:])) else self.shard_bytes(message, key_range)
                _, rows = split_frames(message.payload, own)
                self.rows_bytes[1] += sum(map(len, rows))
        super().put(source, target, key_range, item)

    def shard_bytes(self, message: Message, key_range: int) -> int:
        return self.copies[self.chains.chains[key_range].head, key_range][0].parts[message.shard].tensor_bytes

    def do_all(self, threads: Sequence[Thread]) -> None:
        """Each worker does its own, all at the same time."""
        left, done = dict(enumerate(threads)), object()

        def go_on() -> None:
            for worker, thread in list(left.items()):
                if self.is_idle(worker):
                    talk = next(thread, done)
                    if isinstance(talk, tuple):
                        self.talks[worker], sends = talk
                        self.ask(worker, sends)
                    else:
                        del left[worker]

        go_on()
        while self.deliver_one():
            go_on()
        assert not left, f"{left}: {self.talks}"

    def opened(self) -> Thread:
        yield self.tables[0], self.tables[0].open()
        self.tables[0].require_done()

    def trained(self, worker: int, *, is_exact: bool) -> Thread:
        client, tables, chance = self.clients[worker], self.tables[worker], random.Random(worker)
        for step in range(self.num_steps):
            keys = {
                index: torch.tensor(sorted(chance.sample(range(NUM_KEYS), 4) if not is_exact else range(NUM_KEYS)))
                for index in range(len(self.specs))
                if is_exact or worker != (step + index) % NUM_WORKERS  # who has no rows of this table now
            }
            yield tables, tables.read(keys)
            tables.require_done()
            power = 2.0 ** (worker * self.num_steps + step)
            rows: list[RowGradients | None] = [None] * len(self.specs)
            for index, found in tables.rows().items():
                values = found.to(self.specs[index].computed)
                values = torch.full_like(values, power) if is_exact else torch.cos(values + power)
                rows[index] = RowGradients(keys[index], values)
            parameters, gradients = (LAYOUT.views(buffer) for buffer in self.buffers[worker])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                gradient.copy_(torch.full_like(parameter, power) if is_exact else torch.cos(parameter + power))
            lrs = [] if is_exact else [0.1 / (1 + step), *[None] * (len(self.specs) - 1)]
            assert client.rows_come_along
            client.take_along(tables.parts(rows, weight=1.0 + worker if not is_exact else 1.0, lrs=lrs))
            yield client, client.exchange(Push(pause_at=FOREVER))
            client.require_done()
            assert client.reply().admitted
            assert min(client.reply().staleness) >= 0
        yield client, client.leave()
        client.require_done()

    def train(self, num_steps: int = NUM_STEPS, *, is_exact: bool) -> None:
        self.do_all([self.trained(worker, is_exact=is_exact) for worker in range(NUM_WORKERS)])

    def states(self) -> list[dict[str, Tensor]]:
        """Of each table, on those that serve."""
        heads = [self.copies[chain.head, chain.key_range][0] for chain in self.chains.chains]
        return [joined([core.tables._tables[index].state() for core in heads]) for index in range(len(self.specs))]

    def assert_rows_of_copies_are_equal(self) -> None:
        for chain in self.chains.chains:
            first, *others = [self.copies[server, chain.key_range][0].tables._tables for server in chain.servers]
            for other in others:
                for own, its in zip(first, other, strict=True):
                    assert_same(own.state(), its.state())
                    assert own.counts() == its.counts()


def assert_same(own: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())


def make_net(
    rule: str, specs: Sequence[TableSpec], *, hosts: str, deaths: Iterable[Death] = (), seed: int = 0, replicas: int = 1
) -> RowsNet:
    return RowsNet(rule, specs, hosts=HOSTS[hosts], replicas=replicas, deaths=deaths, seed=seed)


@functools.cache
def undisturbed() -> list[dict[str, Tensor]]:
    """Rows after a synchronous run of servers without copies."""
    net = make_net("bsp", TABLES, hosts="one host", replicas=0)
    net.train(is_exact=False)
    assert all(len(state["keys"]) for state in net.states())
    return net.states()


def assert_bsp_is_undisturbed(hosts: str, deaths: Sequence[Death], seed: int, *, replicas: int) -> None:
    net = make_net("bsp", TABLES, hosts=hosts, deaths=deaths, seed=seed, replicas=replicas)
    net.train(is_exact=False)
    for own, expected in zip(net.states(), undisturbed(), strict=True):
        assert_same(own, expected)
    net.assert_copies_are_equal()
    net.assert_rows_of_copies_are_equal()


def assert_each_gradient_counts_once(rule: str, hosts: str, deaths: Sequence[Death], seed: int, replicas: int) -> None:
    """Each is a power of two of its own, so that their sum tells how often each is part of it."""
    net = make_net(rule, EXACT, hosts=hosts, deaths=deaths, seed=seed, replicas=replicas)
    net.train(is_exact=True)
    (state,) = net.states()
    assert state["keys"].tolist() == list(range(NUM_KEYS))
    assert (state["rows"] == 1.0 - 2.0 ** (NUM_WORKERS * NUM_STEPS)).all()
    net.assert_copies_are_equal()
    net.assert_rows_of_copies_are_equal()
