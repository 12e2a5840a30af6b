"""Copies of rows of tables: servers die after any message, and no row, nor what its optimizer keeps, is another one."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import RunFailed
from paceline.messages import Kind, Message, WireError, split_frames
from paceline.server import entries
from paceline.server.actions import Send
from paceline.server.conversation import Conversation, hear
from paceline.server.spec import Push
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.dividing import joined
from paceline.server.tables.spec import RowGradients, TableSpec
from tests.unit.one_table import spec_of
from tests.unit.replicated_servers import (
    DEATHS,
    EPOCH,
    FOREVER,
    HOSTS,
    LAYOUT,
    PLACES,
    PLAIN,
    SEEDS,
    TWO_DEATHS,
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
        if source != "launcher":
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
        for step in range(NUM_STEPS):
            keys = {
                index: torch.tensor(sorted(chance.sample(range(NUM_KEYS), 4) if not is_exact else range(NUM_KEYS)))
                for index in range(len(self.specs))
                if is_exact or worker != (step + index) % NUM_WORKERS  # who has no rows of this table now
            }
            yield tables, tables.read(keys)
            tables.require_done()
            power = 2.0 ** (worker * NUM_STEPS + step)
            rows: list[RowGradients | None] = [None] * len(self.specs)
            for index, found in tables.rows().items():
                values = found.to(self.specs[index].computed)
                values = torch.full_like(values, power) if is_exact else torch.cos(values + power)
                rows[index] = RowGradients(keys[index], values)
            parameters, gradients = (LAYOUT.views(buffer) for buffer in self.buffers[worker])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                gradient.copy_(torch.full_like(parameter, power) if is_exact else torch.cos(parameter + power))
            lrs = [] if is_exact else [0.1 / (1 + step), None, None]
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


@QUICK
@given(death=DEATHS, hosts=PLACES, seed=SEEDS)
def test_bsp_with_a_death_has_the_rows_of_the_undisturbed_run(death: Death, hosts: str, seed: int) -> None:
    assert_bsp_is_undisturbed(hosts, [death], seed, replicas=1)


@QUICK
@given(rule=st.sampled_from(["asp", "ssp"]), death=DEATHS, hosts=PLACES, seed=SEEDS)
def test_every_gradient_of_rows_counts_once_whoever_dies(rule: str, death: Death, hosts: str, seed: int) -> None:
    assert_each_gradient_counts_once(rule, hosts, [death], seed, replicas=1)


@QUICK
@given(rule=st.sampled_from(["bsp", "asp"]), deaths=TWO_DEATHS, hosts=PLACES, seed=SEEDS)
def test_rows_outlive_two_deaths_with_two_replicas(rule: str, deaths: list[Death], hosts: str, seed: int) -> None:
    if rule == "bsp":
        assert_bsp_is_undisturbed(hosts, deaths, seed, replicas=2)
    else:
        assert_each_gradient_counts_once(rule, hosts, deaths, seed, replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("hosts", sorted(HOSTS))
def test_a_death_after_any_message(hosts: str, victim: int) -> None:
    """Under two rules by turns, of which another victim has the other one. So are the last two that it has sent lost,
    which to the others is as if it had sent two less."""
    for num_sent in range(1, 80):
        death = Death(victim, num_sent, num_lost=num_sent // 2 % 2 * 2)
        if (num_sent + victim) % 2:
            assert_bsp_is_undisturbed(hosts, [death], num_sent, replicas=1)
        else:
            assert_each_gradient_counts_once("asp", hosts, [death], num_sent, replicas=1)


def test_copies_get_one_gradient_an_update_however_many_workers_push() -> None:
    net = make_net("bsp", EXACT, hosts="one host")
    net.train(is_exact=True)
    (spec,) = EXACT
    row_bytes = 8 + spec.dim * spec.dtype.itemsize
    assert net.rows_bytes == [NUM_STEPS * NUM_KEYS * row_bytes, NUM_WORKERS * NUM_STEPS * NUM_KEYS * row_bytes]


@pytest.mark.parametrize("hosts", sorted(HOSTS))
def test_rows_that_were_loaded_outlive_their_servers(hosts: str) -> None:
    source, net = (make_net("bsp", TABLES, hosts=hosts) for _ in range(2))
    source.train(is_exact=False)

    def loaded() -> Thread:
        for index, state in enumerate(source.states()):
            yield net.tables[0], net.tables[0].set_state(index, state)
            net.tables[0].require_done()

    net.do_all([loaded()])
    net.kill(Death(1, 0, 0))
    net.run()
    for own, expected in zip(net.states(), source.states(), strict=True):
        assert_same(own, expected)


def test_a_copy_that_does_not_see_the_files_says_so() -> None:
    net = make_net("bsp", EXACT, hosts="three hosts")
    (copy,) = net.chains.chains[0].servers[1:]
    core, *_ = net.copies[copy, 0]
    about = {"table": 0, "directory": "/nonesuch", "num_servers": 3, "server": 0, "files": [["rows", 1, 0]]}
    said = {"what": "tables", "kind": Kind.LOAD_ROWS.value, "worker": 0, "at": 0, "body": about}
    entry = Message(Kind.REPLICATE, 0, body=said)
    with pytest.raises(RunFailed, match=r"a copy of tables cannot do .* where the hosts of all servers see them"):
        entries.apply(entry, core, entries.zeroed(core.parts), lambda _: None)


def test_a_server_that_does_not_want_to_know_a_worker_ends_what_that_asks() -> None:
    net = make_net("bsp", EXACT, hosts="one host")
    client, tables = net.clients[0], net.tables[0]
    tables.read({0: torch.arange(NUM_KEYS)})
    client.moved(1, epoch=EPOCH + 1, is_beside=True, body={})
    refused = Message(Kind.ERROR, EPOCH + 1, body={"error": "server 2: it only has a copy"})
    with pytest.raises(WireError, match="it only has a copy"):
        list(hear(client, tables, 1, refused))


def test_a_push_whose_frames_do_not_part_is_refused() -> None:
    assert split_frames([b"abc", b"de", b"f"], 5) == ([b"abc", b"de"], [b"f"])
    assert split_frames([b"abc"], 0) == ([], [b"abc"])
    for num_bytes in (4, 9):
        with pytest.raises(WireError, match="do not end where its tensors do"):
            split_frames([b"abc", b"de"], num_bytes)
