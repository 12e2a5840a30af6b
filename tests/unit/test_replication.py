"""Copies of key ranges: servers die after any message, and nothing that was acknowledged is lost or done twice."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paceline
from paceline.errors import UsageError
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import Kind, Message
from paceline.records import UpdateRecord
from paceline.server.actions import Send, Updated
from paceline.server.admission import BulkSynchronous, StaleSynchronous
from paceline.server.chains import Chain, Chains, from_body, to_body
from paceline.server.client_core import ClientCore
from paceline.server.part_state import states_of
from paceline.server.ranges import cut
from paceline.server.replication import CopyAction, Replication, Said, ToServer
from paceline.server.server_core import ServerCore
from paceline.server.spec import OptimizerSpec, Push, ServerSpec
from paceline.strategies.parameter_server import ParameterServer

EPOCH, FOREVER, GONE = 1, 10**9, 10**6
LAYOUT = by_group([TensorSpec("weight", (96,), torch.float32), TensorSpec("bias", (5,), torch.float64)])
PLAIN = OptimizerSpec(torch.optim.SGD, {"lr": 1.0}, ({"lr": 1.0},), element_wise=True)
ADAM = OptimizerSpec(torch.optim.Adam, {"lr": 0.1}, ({"lr": 0.1},), element_wise=True)
RULES = {
    "bsp": BulkSynchronous,
    "ssp": partial(StaleSynchronous, staleness=1),
    "asp": partial(StaleSynchronous, staleness=math.inf),
}


@dataclass(frozen=True)
class Death:
    """A server dies once it has sent so many messages, of which only so many of each way's last ones are lost."""

    server: int
    num_sent: int
    num_lost: int


class Net:
    """Workers, servers with copies, and who tells them of deaths. What is sent arrives in any order, except on one
    way; what was sent to a dead server is lost, and the last of what it has sent may be."""

    num_joiners = 0
    """Of the workers, the last, who do not take part from the start."""
    piece_bytes = 128

    def __init__(
        self,
        rule: str,
        *,
        num_workers: int,
        hosts: Sequence[str],
        replicas: int,
        spec: OptimizerSpec,
        deaths: Iterable[Death],
        seed: int,
        outlives_workers: bool = False,
        worker_hosts: Sequence[str] = (),
    ) -> None:
        self.chains = Chains.first(hosts, replicas=replicas, epoch=EPOCH)
        self.hosts, self.random = hosts, random.Random(seed)
        self.deaths: dict[int, Death] = {}
        self.num_sent: Counter[int] = Counter()
        """By server, since all began to train."""
        self.dead: set[int] = set()
        self.ways: dict[tuple[str, str, int], deque[Any]] = {}
        self.records: list[UpdateRecord] = []
        ranges = cut(LAYOUT, num_servers=len(hosts), whole_tensors=False, piece_bytes=self.piece_bytes)
        members = Membership(EPOCH, tuple(range(num_workers - self.num_joiners)))
        self.worker_hosts = list(worker_hosts) or [hosts[rank % len(hosts)] for rank in range(num_workers)]
        self.outlives_workers, is_apart = outlives_workers, len(set(hosts)) > 1
        self.copies: dict[tuple[int, int], tuple[ServerCore, Replication]] = {}
        for chain in self.chains.chains:
            for server in chain.servers:
                core = ServerCore(index=chain.key_range, epoch=EPOCH)
                core.configure(
                    ServerSpec(
                        LAYOUT,
                        ranges[chain.key_range],
                        spec,
                        RULES[rule](members),
                        None,
                        outlives_workers=outlives_workers,
                        is_copied_apart=is_apart,
                    )
                )
                reach = partial(self.attach_copy, server, chain.key_range)
                self.copies[server, chain.key_range] = core, Replication(core, server=server, chain=chain, reach=reach)
        self.heads = [[chain.head for chain in self.chains.chains] for _ in range(num_workers)]  # as workers know
        self.buffers = [
            [torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(2)] for _ in range(num_workers)
        ]
        self.clients = [
            ClientCore(rank=rank, epoch=EPOCH, beside=[self.is_beside(rank, server) for server in self.heads[rank]])
            for rank in range(num_workers)
        ]
        for rank, client in enumerate(self.clients):
            parameters, gradients = self.buffers[rank]
            self.ask(
                rank,
                client.attach(
                    LAYOUT,
                    ranges,
                    whole=False,
                    parameters=parameters,
                    gradients=gradients,
                    bodies=[{"server": server} for server in self.heads[rank]],
                ),
            )
            self.run()
            client.attached()
        self.ask(0, self.clients[0].initialise(iteration=0))
        self.run()
        self.deaths = {death.server: death for death in deaths}

    def is_beside(self, worker: int, server: int) -> bool:
        return self.worker_hosts[worker] == self.hosts[server]

    def ask(self, worker: int, sends: Iterable[Send]) -> None:
        for key_range, message in sends:
            server = self.heads[worker][key_range]
            self.put(f"w{worker}", f"s{server}", key_range, [bytes(frame) for frame in message.encode()])

    def put(self, source: str, target: str, key_range: int, item: Any) -> None:
        self.ways.setdefault((source, target, key_range), deque()).append(item)

    def run(self) -> None:
        while self.deliver_one():
            pass

    def deliver_one(self) -> bool:
        ways = [way for way, queue in self.ways.items() if queue]
        if not ways:
            return False
        source, target, key_range = way = self.random.choice(ways)
        self.take(source, target, key_range, self.ways[way].popleft())
        return True

    def take(self, source: str, target: str, key_range: int, item: Any) -> None:
        number = int(target[1:])
        if target[0] == "s" and number in self.dead:
            return
        if source == "launcher":
            self.hear_of(target, item)
        elif target[0] == "w":
            client = self.clients[number]
            if source == f"s{self.heads[number][key_range]}":  # else it has closed that way
                self.ask(number, client.receive(key_range, Message.decode(item, epoch=None)))
        else:
            self.serve(source, number, key_range, Message.decode(item, epoch=None))

    def serve(self, source: str, server: int, key_range: int, message: Message) -> None:
        core, copy = self.copies[server, key_range]
        if message.kind is Kind.ATTACH:
            worker = int(source[1:])
            is_beside = self.is_beside(worker, server)
            parameters, gradients = self.buffers[worker] if is_beside else (None, None)
            about = core.attach(message, gradients=gradients, parameters=parameters, is_beside=is_beside)
            answer = core.message(Kind.OK, body=about)
            told = copy.attached(message, answer) if self.outlives_workers else iter([Send(worker, answer)])
            self.do(server, key_range, told)
        else:
            self.do(server, key_range, copy.receive(message, 0.0))

    def attach_copy(self, server: int, key_range: int, message: Message) -> None:
        """As a copy does that another one tells of this worker."""
        is_beside = self.is_beside(message.sender, server)
        gradients = self.buffers[message.sender][1] if is_beside else None
        self.copies[server, key_range][0].attach(message, gradients=gradients, parameters=None, is_beside=is_beside)

    def do(self, server: int, key_range: int, actions: Iterator[CopyAction]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.message.kind is not Kind.ERROR, action.message.body
                self.put(f"s{server}", f"w{action.to}", key_range, [bytes(frame) for frame in action.message.encode()])
            elif isinstance(action, ToServer):
                frames = [bytes(frame) for frame in action.message.encode()]
                self.put(f"s{server}", f"s{action.to}", key_range, frames)
            elif isinstance(action, Said):
                action.say(action.what)
            elif isinstance(action, Updated):
                self.records += action.records
                continue
            death = self.deaths.get(server)
            self.num_sent[server] += death is not None
            if death is not None and self.num_sent[server] == death.num_sent:
                self.kill(death)
                return

    def kill(self, death: Death) -> None:
        self.dead.add(death.server)
        for (source, _, _), queue in self.ways.items():
            if source == f"s{death.server}":
                for _ in range(min(death.num_lost, len(queue))):
                    queue.pop()
        self.chains, changed = self.chains.died(death.server)
        for chain in changed:
            for server in chain.servers:
                self.put("launcher", f"s{server}", chain.key_range, to_body(chain))

    def hear_of(self, target: str, item: Any) -> None:
        number = int(target[1:])
        chain = from_body(item)
        if target[0] == "w":
            if chain.head not in self.dead and self.heads[number][chain.key_range] != chain.head:
                self.heads[number][chain.key_range] = chain.head
                is_beside = self.is_beside(number, chain.head)
                client = self.clients[number]
                self.ask(number, client.moved(chain.key_range, epoch=chain.epoch, is_beside=is_beside, body={}))
            return
        self.do(number, chain.key_range, self.copies[number, chain.key_range][1].reform(chain))
        if chain.head == number:
            for worker in range(len(self.clients)):
                self.put("launcher", f"w{worker}", chain.key_range, item)

    def train(self, num_steps: int, *, is_exact: bool) -> None:
        """Each worker pushes so many times, whenever it may, and leaves.

        Args:
            is_exact: every gradient is a power of two of its own; else it depends on the parameters.
        """
        steps, is_asking = [0] * len(self.clients), [False] * len(self.clients)

        def go_on() -> None:
            for worker, client in enumerate(self.clients):
                if is_asking[worker] and client.is_done and steps[worker] == num_steps:
                    client.require_done()
                    is_asking[worker], steps[worker] = False, GONE
                if is_asking[worker] and client.is_done:
                    client.require_done()
                    reply = client.reply()
                    assert reply.admitted
                    assert min(reply.staleness) >= 0
                    is_asking[worker], steps[worker] = False, steps[worker] + 1
                if not is_asking[worker] and steps[worker] < num_steps:
                    parameters, gradients = (LAYOUT.views(buffer) for buffer in self.buffers[worker])
                    power = 2.0 ** (worker * num_steps + steps[worker])
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        gradient.copy_(power if is_exact else torch.cos(parameter + power))
                    groups = ({"lr": 0.1 / (1 + steps[worker])},) if not is_exact and worker == 0 else None
                    self.ask(worker, client.exchange(Push(pause_at=FOREVER, groups=groups)))
                    is_asking[worker] = True
                if not is_asking[worker] and steps[worker] == num_steps:
                    self.ask(worker, client.leave())
                    is_asking[worker] = True

        go_on()
        while self.deliver_one():
            go_on()
        assert steps == [GONE] * len(steps), f"{steps}: {[client.due for client in self.clients]}"

    def heads_parameters(self) -> list[list[Tensor]]:
        return [self.parameters(chain.head, chain.key_range) for chain in self.chains.chains]

    def parameters(self, server: int, key_range: int) -> list[Tensor]:
        return [tensor for part in self.copies[server, key_range][0].parts for tensor in part.shard.parameters]

    def assert_copies_are_equal(self) -> None:
        for chain in self.chains.chains:
            first, *others = [self.copies[server, chain.key_range][0] for server in chain.servers]
            for other in others:
                assert other.iteration == first.iteration
                pairs = zip(states_of(first.parts).items(), states_of(other.parts).items(), strict=True)
                assert all(name == theirs and torch.equal(own, its) for (name, own), (theirs, its) in pairs)
                assert all(part.shard.rule.active == set() for part in other.parts)
            for server in chain.servers:
                pairs_of_tensors = zip(
                    self.parameters(chain.head, chain.key_range), self.parameters(server, chain.key_range), strict=True
                )
                assert all(torch.equal(own, its) for own, its in pairs_of_tensors)


HOSTS = {"one host": ["a", "a", "a"], "three hosts": ["a", "b", "c"], "two hosts": ["a", "a", "b"]}
NUM_STEPS, NUM_ELEMENTS = 4, 101
DEATHS = st.builds(Death, st.integers(0, 2), st.integers(1, 50), st.integers(0, 3))
TWO_DEATHS = st.lists(DEATHS, min_size=2, max_size=2, unique_by=lambda death: death.server)
PLACES, SEEDS = st.sampled_from(sorted(HOSTS)), st.integers(0, 2**32)
QUICK = settings(max_examples=20, deadline=None)


def make_net(
    rule: str, *, hosts: str, deaths: Iterable[Death], seed: int, spec: OptimizerSpec, replicas: int = 1
) -> Net:
    return Net(rule, num_workers=3, hosts=HOSTS[hosts], replicas=replicas, spec=spec, deaths=deaths, seed=seed)


@functools.cache
def undisturbed() -> list[list[Tensor]]:
    """What the heads have after a synchronous run in which nobody dies."""
    net = make_net("bsp", hosts="one host", deaths=[], seed=0, spec=ADAM)
    net.train(NUM_STEPS, is_exact=False)
    return net.heads_parameters()


def assert_bsp_is_undisturbed(hosts: str, deaths: Sequence[Death], seed: int, *, replicas: int) -> None:
    net = make_net("bsp", hosts=hosts, deaths=deaths, seed=seed, spec=ADAM, replicas=replicas)
    net.train(NUM_STEPS, is_exact=False)
    for own, expected in zip(net.heads_parameters(), undisturbed(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    net.assert_copies_are_equal()


def assert_each_gradient_counts_once(
    rule: str, hosts: str, deaths: Sequence[Death], seed: int, *, replicas: int
) -> None:
    """Each is a power of two of its own, so that their sum tells how often each is part of it."""
    net = make_net(rule, hosts=hosts, deaths=deaths, seed=seed, spec=PLAIN, replicas=replicas)
    net.train(NUM_STEPS, is_exact=True)
    values = torch.cat([parameter.double() for parameters in net.heads_parameters() for parameter in parameters])
    assert values[values != 0].tolist() == [1.0 - 2.0 ** (3 * NUM_STEPS)] * NUM_ELEMENTS  # and 0 where nothing lies
    for chain in net.chains.chains:
        parts = net.copies[chain.head, chain.key_range][0].parts
        assert [part.shard.iteration for part in parts] == [3 * NUM_STEPS] * len(parts)
    told = [(record.server, record.worker, record.clock) for record in net.records]
    assert len(told) == len(set(told))
    net.assert_copies_are_equal()


@QUICK
@given(death=DEATHS, hosts=PLACES, seed=SEEDS)
def test_bsp_with_a_death_is_the_undisturbed_run(death: Death, hosts: str, seed: int) -> None:
    assert_bsp_is_undisturbed(hosts, [death], seed, replicas=1)


@QUICK
@given(rule=st.sampled_from(["asp", "ssp"]), death=DEATHS, hosts=PLACES, seed=SEEDS)
def test_every_gradient_counts_once_whoever_dies(rule: str, death: Death, hosts: str, seed: int) -> None:
    assert_each_gradient_counts_once(rule, hosts, [death], seed, replicas=1)


@QUICK
@given(deaths=TWO_DEATHS, hosts=PLACES, seed=SEEDS)
def test_two_replicas_outlive_two_deaths(deaths: list[Death], hosts: str, seed: int) -> None:
    assert_bsp_is_undisturbed(hosts, deaths, seed, replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("hosts", sorted(HOSTS))
def test_a_death_after_any_message(hosts: str, victim: int) -> None:
    for num_sent in range(1, 60):
        for num_lost in (0, 2):
            death = Death(victim, num_sent, num_lost)
            assert_bsp_is_undisturbed(hosts, [death], num_sent, replicas=1)
            assert_each_gradient_counts_once("asp", hosts, [death], num_sent, replicas=1)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(rule=st.sampled_from(["asp", "ssp"]), deaths=TWO_DEATHS, hosts=PLACES, seed=SEEDS)
def test_two_replicas_count_every_gradient_once(rule: str, deaths: list[Death], hosts: str, seed: int) -> None:
    assert_each_gradient_counts_once(rule, hosts, deaths, seed, replicas=2)


def test_a_state_that_was_loaded_outlives_its_server() -> None:
    net = make_net("bsp", hosts="three hosts", deaths=[], seed=0, spec=ADAM)
    state = {f"{index}.exp_avg": torch.rand(slot.shape, dtype=slot.dtype) for index, slot in enumerate(LAYOUT.specs)}
    state |= {name.replace("avg", "avg_sq"): torch.ones_like(tensor) for name, tensor in state.items()}
    net.ask(0, net.clients[0].set_state(state | {f"{index}.step": torch.tensor(3.0) for index in (0, 1)}))
    net.run()
    net.clients[0].require_done()
    net.kill(Death(1, 0, 0))
    net.ask(0, net.clients[0].get_state())
    net.run()
    loaded = net.clients[0].state()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    net.train(NUM_STEPS, is_exact=False)


def test_only_the_head_serves_and_nothing_of_an_epoch_before_is_taken() -> None:
    net = make_net("bsp", hosts="one host", deaths=[], seed=0, spec=PLAIN, replicas=2)
    (_, head), (_, tail) = net.copies[1, 0], net.copies[2, 0]
    for copy in (head, tail):
        list(copy.reform(Chain(0, (1, 2), EPOCH + 1)))
    stale, unknown = (Message(Kind.REPLICATE, epoch, sender=0, clock=FOREVER) for epoch in (EPOCH, EPOCH + 1))
    assert list(tail.receive(stale, 0.0)) == []
    assert list(tail.receive(unknown, 0.0)) == []
    assert list(head.receive(unknown, 0.0)) == []
    (refused,) = tail.receive(Message(Kind.PULL, EPOCH + 1, sender=0), 0.0)
    assert isinstance(refused, Send)
    assert "it only has a copy" in refused.message.body["error"]


def test_servers_of_a_chain_are_on_different_hosts() -> None:
    chains = Chains.first(["a", "a", "b", "b"], replicas=1, epoch=EPOCH).chains
    assert [chain.servers for chain in chains] == [(0, 2), (1, 3), (2, 1), (3, 0)]
    assert sorted(chain.servers[1] for chain in chains) == [0, 1, 2, 3]
    for hosts in (["a", "b", "c", "a"], ["a", "a", "b", "c"], ["a", "b", "a", "b", "c", "a"]):
        for chain in Chains.first(hosts, replicas=1, epoch=EPOCH).chains:
            assert hosts[chain.servers[0]] != hosts[chain.servers[1]]


def test_whoever_comes_next_serves_and_the_epoch_tells_so() -> None:
    chains = Chains.first(["a"] * 3, replicas=1, epoch=EPOCH)
    left, changed = chains.died(1)
    assert changed == [Chain(1, (0,), EPOCH + 1), Chain(2, (2,), EPOCH)]
    lost, changed = left.died(0)
    assert [chain.key_range for chain in changed if not chain.servers] == [1]
    assert lost.dead == (1, 0)


@pytest.mark.parametrize(
    ("consistency", "options", "found"),
    [
        ("bsp", {"backup_workers": 1}, "backup_workers"),
        ("asp", {"torn_reads": True}, "torn_reads"),
        ("ssp", {"servers": 1}, "servers=1"),
    ],
)
def test_what_copies_would_not_have_is_refused(consistency: Any, options: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        ParameterServer(consistency=consistency, **{"servers": 2, "replicas": 1, **options})


def test_a_second_optimizer_and_simulated_time_are_refused(tmp_path: Path) -> None:
    strategy = ParameterServer(servers=2, replicas=1)
    with pytest.raises(UsageError, match="one optimizer so far"):
        strategy.admission_rule_beside(Membership.first(2))
    with pytest.raises(UsageError, match="the virtual engine would call what replicas take free"):
        paceline.run(list, strategy=strategy, workers=2, engine="virtual", cluster="lab-1gbe", out=tmp_path / "out")


@pytest.mark.parametrize("body", [{}, {"key_range": 0, "servers": 3, "epoch": 1}, {"key_range": 0, "servers": [True]}])
def test_what_is_no_chain_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="refused"):
        from_body(body)
