"""Workers and servers with copies in one process, of which servers die after any message."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import Kind, Message
from paceline.records import UpdateRecord
from paceline.server.actions import Send, Updated
from paceline.server.admission import BulkSynchronous, StaleSynchronous
from paceline.server.chains import Chain, Chains, Handover, from_body, to_body
from paceline.server.client_core import ClientCore
from paceline.server.coded_push import PushCoding
from paceline.server.conversation import Conversation, hear
from paceline.server.part import Part
from paceline.server.part_state import states_of
from paceline.server.ranges import cut
from paceline.server.replication import Copied, CopyAction, HandedOver, Replication, Said, ToServer
from paceline.server.server_core import ServerCore
from paceline.server.spec import OptimizerSpec, Push, ServerSpec
from paceline.server.spreading import departure, removal, succession

EPOCH, FOREVER, GONE, ATTEMPTS = 1, 10**9, 10**6, 9
LAYOUT = by_group([TensorSpec("weight", (96,), torch.float32), TensorSpec("bias", (5,), torch.float64)])
PLAIN = OptimizerSpec(torch.optim.SGD, {"lr": 1.0}, ({"lr": 1.0},), element_wise=True)
RULES = {
    "bsp": BulkSynchronous,
    "ssp": partial(StaleSynchronous, staleness=1),
    "asp": partial(StaleSynchronous, staleness=math.inf),
}
HOSTS = {"one host": ["a", "a", "a"], "three hosts": ["a", "b", "c"], "two hosts": ["a", "a", "b"]}
NUM_STEPS, NUM_ELEMENTS = 4, 101


@dataclass(frozen=True)
class Death:
    """A server dies once it has sent so many messages, of which only so many of each way's last ones are lost."""

    server: int
    num_sent: int
    num_lost: int


@dataclass(frozen=True)
class Joining:
    """A server comes to this host once so many messages have arrived, since all began to train."""

    after: int
    host: str


class Net:
    """Workers, servers with copies, and who tells them of deaths. What is sent arrives in any order, except on one
    way; what was sent to a dead server is lost, and the last of what it has sent may be."""

    num_joiners = 0
    """Of the workers, the last, who do not take part from the start."""
    piece_bytes = 128
    copies_anew = False
    """Where a chain has lost a server, another one is given a copy, at any time after that, and once servers have died
    or joined, key ranges and copies move. A server only dies while each key range has another copy."""

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
        coding: Sequence[PushCoding] = (),
    ) -> None:
        """`coding`: of what each worker pushes; none: it goes as it is."""
        self.chains = Chains.first(hosts, replicas=replicas, epoch=EPOCH)
        self.hosts, self.random = list(hosts), random.Random(seed)
        self.joining: list[Joining] = []
        self.num_delivered = 0
        self.num_handed = 0
        self.unserved: set[int] = set()
        """Key ranges of which the launcher has yet to hear who serves them."""
        self.put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.deaths: dict[int, Death] = {}
        self.num_sent: Counter[int] = Counter()
        """By server, since all began to train."""
        self.dead: set[int] = set()
        self.num_copied: Counter[str] = Counter()
        """New copies, or why there was none, and key ranges that were handed over."""
        self.ways: dict[tuple[str, str, int], deque[Any]] = {}
        self.records: list[UpdateRecord] = []
        self.talks: dict[int, Conversation] = {}
        """By worker, if it is about tables, what it asks."""
        self.on_line: set[tuple[int, int]] = set()
        """Workers that have asked a server on their host, each with the key range, and have no answer yet: a line takes
        one request at a time."""
        ranges = cut(LAYOUT, num_servers=len(hosts), whole_tensors=False, piece_bytes=self.piece_bytes)
        members = Membership(EPOCH, tuple(range(num_workers - self.num_joiners)))
        self.worker_hosts = list(worker_hosts) or [hosts[rank % len(hosts)] for rank in range(num_workers)]
        self.outlives_workers, is_apart = outlives_workers, len(set(hosts)) > 1
        self.copies: dict[tuple[int, int], tuple[ServerCore, Replication]] = {}
        self.versions: dict[tuple[int, int], int] = {}
        """Of the chains that copies were built by."""
        self.reached: set[tuple[int, int, int]] = set()
        """Workers, each with a copy's server and key range: the copy reads their memory, also once they are dead."""
        self.built_by: dict[int, int] = {}
        """By key range, the version of its chain that its newcomer was built by."""
        self.server_specs = [
            ServerSpec(
                LAYOUT,
                pieces,
                spec,
                RULES[rule](members),
                None,
                outlives_workers=outlives_workers,
                is_copied_apart=is_apart,
                codec=coding[0].codec if coding else None,
            )
            for pieces in ranges
        ]
        for chain in self.chains.chains:
            for server in chain.servers:
                self.build(server, chain)
        self.heads = [[chain.head for chain in self.chains.chains] for _ in range(num_workers)]  # as workers know
        self.epochs = [[EPOCH for _ in self.chains.chains] for _ in range(num_workers)]
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
                    coding=coding[rank] if coding else None,
                ),
            )
            self.run()
            client.attached()
        self.ask(0, self.clients[0].initialise(iteration=0))
        self.run()
        self.deaths, self.num_delivered = {death.server: death for death in deaths}, 0

    def new_core(self, chain: Chain) -> ServerCore:
        core = ServerCore(index=chain.key_range, epoch=chain.epoch)
        core.configure(self.server_specs[chain.key_range].anew())
        return core

    def build(self, server: int, chain: Chain) -> None:
        core = self.new_core(chain)
        reach, is_new = partial(self.attach_copy, server, chain.key_range), server == chain.newcomer
        copy = Replication(core, server=server, chain=chain, reach=reach, is_new=is_new)
        self.copies[server, chain.key_range] = core, copy
        self.versions[server, chain.key_range] = chain.version
        self.reached -= {each for each in self.reached if each[1:] == (server, chain.key_range)}

    def talk_of(self, worker: int) -> Conversation:
        return self.talks.get(worker, self.clients[worker])

    def is_idle(self, worker: int) -> bool:
        """Whether all that it has asked is answered."""
        return self.talk_of(worker).is_done and self.clients[worker].is_done

    def is_beside(self, worker: int, server: int) -> bool:
        return self.worker_hosts[worker] == self.hosts[server]

    def ask(self, worker: int, sends: Iterable[Send]) -> None:
        for key_range, message in sends:
            server, message.epoch = self.heads[worker][key_range], self.epochs[worker][key_range]
            if self.is_beside(worker, server):
                assert (worker, key_range) not in self.on_line, f"a second request: {message.kind.name}"
                self.on_line.add((worker, key_range))
            self.put(f"w{worker}", f"s{server}", key_range, [bytes(frame) for frame in message.encode()])

    def put(self, source: str, target: str, key_range: int, item: Any) -> None:
        self.ways.setdefault((source, target, key_range), deque()).append(item)

    def run(self) -> None:
        while self.deliver_one():
            pass

    def deliver_one(self) -> bool:
        ways = [way for way, queue in self.ways.items() if queue]
        if (not ways or self.random.random() < 0.1) and self.go_on_moving():
            return True
        if not ways:
            return False
        self.num_delivered += 1
        source, target, key_range = way = self.random.choice(ways)
        self.take(source, target, key_range, self.ways[way].popleft())
        return True

    def go_on_moving(self) -> bool:
        """What the launcher does of itself; whether there was anything."""
        if self.joining and (self.num_delivered >= self.joining[0].after or not any(self.ways.values())):
            self.hosts.append(self.joining.pop(0).host)
            self.chains = self.chains.joined(len(self.hosts) - 1, self.hosts[-1])
            return True
        return self.copies_anew and self.move()

    def take(self, source: str, target: str, key_range: int, item: Any) -> None:
        if target == "launcher":
            self.hear_of_copies(key_range, item)
            return
        number = int(target[1:])
        is_gone = number in self.dead or (source != "launcher" and (number, key_range) not in self.copies)
        if target[0] == "s" and is_gone:
            return
        if source == "launcher":
            self.hear_of(target, item)
        elif target[0] == "w":
            if source == f"s{self.heads[number][key_range]}":  # else it has closed that way
                answer = Message.decode(item, epoch=None)
                self.on_line.discard((number, key_range))
                self.ask(number, hear(self.clients[number], self.talk_of(number), key_range, answer))
        else:
            self.serve(source, number, key_range, Message.decode(item, epoch=None))

    def serve(self, source: str, server: int, key_range: int, message: Message) -> None:
        if (server, key_range) not in self.copies:
            assert source[0] == "s", "it has been dropped, which no worker has heard of"
            return
        core, copy = self.copies[server, key_range]
        is_of_worker = source[0] == "w"
        if copy.has_stopped and is_of_worker:
            again = partial(self.serve, source, server, key_range, message)
            self.put_off.setdefault((server, key_range), []).append(again)
        elif is_of_worker and not (copy.is_head and message.epoch == core.epoch):
            pass  # it has yet to hear who serves
        elif message.kind is Kind.ATTACH:
            worker = int(source[1:])
            is_beside = self.is_beside(worker, server)
            parameters, gradients = self.buffers[worker] if is_beside else (None, None)
            self.note_open(worker, server, key_range)
            about = core.attach(message, gradients=gradients, parameters=parameters, is_beside=is_beside)
            answer = core.message(Kind.OK, body=about)
            told = copy.attached(message, answer) if self.outlives_workers else iter([Send(worker, answer)])
            self.do(server, key_range, told)
        else:
            self.do(server, key_range, copy.receive(message, 0.0))

    def reads(self, worker: int, server: int) -> bool:
        """Whether copies of this server's read the worker's memory."""
        return self.is_beside(worker, server) and len(set(self.hosts)) == 1

    def note_open(self, worker: int, server: int, key_range: int) -> None:
        if self.reads(worker, server):
            self.reached.add((worker, server, key_range))

    def attach_copy(self, server: int, key_range: int, message: Message) -> bool:
        """As a copy does that another one tells of this worker."""
        is_beside = self.reads(message.sender, server)
        gradients = self.buffers[message.sender][1] if is_beside else None
        self.note_open(message.sender, server, key_range)
        self.copies[server, key_range][0].attach(message, gradients=gradients, parameters=None, is_beside=is_beside)
        return True

    def do(self, server: int, key_range: int, actions: Iterator[CopyAction]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.message.kind is not Kind.ERROR, action.message.body
                self.put(f"s{server}", f"w{action.to}", key_range, [bytes(frame) for frame in action.message.encode()])
            elif isinstance(action, ToServer):
                assert action.to != server
                frames = [bytes(frame) for frame in action.message.encode()]
                self.put(f"s{server}", f"s{action.to}", key_range, frames)
            elif isinstance(action, Said):
                action.say(action.what)
            elif isinstance(action, Copied | HandedOver):
                self.put(f"s{server}", "launcher", key_range, action)
            elif isinstance(action, Updated):
                self.records += action.records
                continue
            death = self.deaths.get(server)
            self.num_sent[server] += death is not None
            if death is not None and self.num_sent[server] >= death.num_sent and server not in self.dead:
                others = all(chain.without(server).servers for chain in self.chains.chains)
                if others or not self.copies_anew:
                    self.kill(death)
                    return

    def kill(self, death: Death) -> None:
        self.dead.add(death.server)
        for (source, _, _), queue in self.ways.items():
            if source == f"s{death.server}":
                for _ in range(min(death.num_lost, len(queue))):
                    queue.pop()
        served = {chain.key_range for chain in self.chains.chains if chain.head == death.server}
        after, changed = self.chains.died(death.server)
        self.chains = replace(self.chains, dead=after.dead)
        self.unserved |= served
        for chain in changed:
            self.tell(chain)

    def tell(self, chain: Chain) -> None:
        before = self.chains.chains[chain.key_range]
        self.chains = self.chains.changed(chain)
        chain = self.chains.chains[chain.key_range]
        told = {*before.servers, before.newcomer, *chain.servers, chain.newcomer} & self.chains.living
        for server in sorted(told):
            self.put("launcher", f"s{server}", chain.key_range, to_body(chain))

    def hear_of_copies(self, key_range: int, told: Copied | HandedOver) -> None:
        """As the launcher does, once all key ranges are served."""
        chain = self.chains.chains[key_range]
        if self.unserved:
            self.put("launcher", "launcher", key_range, told)
        elif isinstance(told, Copied):
            is_known = chain.newcomer is not None and chain.newcomer == told.chain.newcomer
            is_of_this_attempt = is_known and told.chain.version >= self.built_by[key_range]
            if is_of_this_attempt and chain.servers[-1] == told.chain.servers[-1]:
                self.num_copied[told.why_not] += 1
                self.tell(replace(chain, newcomer=None) if told.why_not else chain.extended())
        elif chain == told.chain and told.why_not:
            self.num_copied[told.why_not] += ATTEMPTS
            self.tell(replace(chain, handover=None))
        elif chain == told.chain:
            self.num_copied["handed over"] += 1
            self.unserved.add(key_range)
            self.tell(chain.handed_over())

    def move(self, *, may_hand_over: bool = True) -> bool:
        """As the launcher does by and by, one thing at a time; whether there was anything."""
        chains, may_copy = self.chains, sum(self.num_copied.values()) < ATTEMPTS or self.has_copied_all
        if chains.is_of_the_start or self.unserved:
            return False
        newcomers = [*chains.lacking()] if may_copy else []
        is_at_rest = all(chain.is_at_rest for chain in chains.chains)
        leaving = departure(chains) if is_at_rest and may_hand_over else None
        if not newcomers and is_at_rest and leaving is None and may_copy:
            newcomers = [moved] if (moved := removal(chains)) is not None else []
        if newcomers:
            assert newcomers[0].newcomer is not None
            self.build(newcomers[0].newcomer, newcomers[0])
            self.tell(newcomers[0])
            self.built_by[newcomers[0].key_range] = newcomers[0].version
        elif leaving is not None and leaving.server != leaving.chain.head:
            self.tell(leaving.chain.without(leaving.server))
        elif leaving is not None:
            self.hand_over(leaving.chain, self.random.choice(leaving.chain.servers[1:]))
        elif is_at_rest and may_hand_over and may_copy and (following := succession(chains)) is not None:
            self.hand_over(*following)
        else:
            return False
        return True

    @property
    def has_copied_all(self) -> bool:
        """Whether no copy was refused."""
        return self.num_copied.keys() <= {"", "handed over"}

    def hand_over(self, chain: Chain, to: int) -> None:
        self.num_handed += 1
        self.tell(replace(chain, handover=Handover(to, self.num_handed)))

    def hear_of(self, target: str, item: Any) -> None:
        number = int(target[1:])
        chain = from_body(item)
        if target[0] == "s":
            if self.reform(number, chain):
                for worker in range(len(self.clients)):
                    self.put("launcher", f"w{worker}", chain.key_range, item)
        elif chain.head not in self.dead and self.epochs[number][chain.key_range] < chain.epoch:
            self.heads[number][chain.key_range] = chain.head
            self.epochs[number][chain.key_range] = chain.epoch
            self.on_line.discard((number, chain.key_range))
            self.ways[f"s{chain.head}", f"w{number}", chain.key_range] = deque()  # what came on a way that is closed
            is_beside, client = self.is_beside(number, chain.head), self.clients[number]
            self.ask(number, client.moved(chain.key_range, epoch=chain.epoch, is_beside=is_beside, body={}))

    def reform(self, server: int, chain: Chain) -> bool:
        """A server hears of a chain that it is in, or was; whether it serves now."""
        key = server, chain.key_range
        if key not in self.copies or chain.version <= self.versions[key]:
            return False  # it was told before this one was built
        if server not in (*chain.servers, chain.newcomer):
            self.copies.pop(key)[0].close()
            self.put_off.pop(key, None)
            return False
        core, copy = self.copies[key]
        if copy.has_stopped and chain.epoch > core.epoch:
            self.step_back(server, chain)
        self.do(server, chain.key_range, self.copies[key][1].reform(chain))
        for do in self.put_off.pop(key, []):
            do()
        if chain == self.chains.chains[chain.key_range] and chain.head == server not in self.dead:
            self.unserved.discard(chain.key_range)
        return chain.head == server

    def step_back(self, server: int, chain: Chain) -> None:
        """The memory of workers that was in reach stays so."""
        core, (_, copy) = self.new_core(chain), self.copies[server, chain.key_range]
        self.copies[server, chain.key_range] = core, copy
        reach = partial(Net.attach_copy, self, server, chain.key_range)
        self.copies[server, chain.key_range] = core, copy.stepped_back(chain, core, reach)

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
                    client.settle(reply)
                    assert reply.admitted
                    assert min(reply.staleness) >= 0
                    is_asking[worker], steps[worker] = False, steps[worker] + 1
                if not is_asking[worker] and steps[worker] < num_steps:
                    parameters, gradients = (LAYOUT.views(buffer) for buffer in self.buffers[worker])
                    power = 2.0 ** (worker * num_steps + steps[worker])
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        gradient.copy_(power if is_exact else torch.cos(parameter + power))
                    groups = ({"lr": 0.1 / (1 + steps[worker])},) if not is_exact and worker == 0 else None
                    push = Push(pause_at=FOREVER, groups=groups)
                    client.encode(push)
                    self.ask(worker, client.exchange(push))
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

    def parts_of(self, key_range: int) -> list[Part]:
        """Of whoever serves it."""
        return self.copies[self.chains.chains[key_range].head, key_range][0].parts

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

    def assert_each_gradient_counted(self) -> None:
        """Each once, in an update of its own, after `train(NUM_STEPS, is_exact=True)` of three workers."""
        values = torch.cat([parameter.double() for parameters in self.heads_parameters() for parameter in parameters])
        assert values[values != 0].tolist() == [1.0 - 2.0 ** (3 * NUM_STEPS)] * NUM_ELEMENTS  # and 0 where nothing lies
        for chain in self.chains.chains:
            parts = self.copies[chain.head, chain.key_range][0].parts
            assert [part.shard.iteration for part in parts] == [3 * NUM_STEPS] * len(parts)
        told = [(record.server, record.worker, record.clock) for record in self.records]
        assert len(told) == len(set(told))

    def assert_none_is_lacking(self) -> None:
        """And what was to become a copy, and has not, is gone."""
        left = len(self.hosts) - len(self.dead)
        for chain in self.chains.chains:
            assert len(chain.servers) == min(left, self.chains.replicas + 1)
            assert chain.is_at_rest
            built = {server for server, key_range in self.copies if key_range == chain.key_range}
            assert built - self.dead == {*chain.servers}
        assert self.chains.is_of_the_start or (removal(self.chains), succession(self.chains)) == (None, None)


@final
class Restored(Net):
    copies_anew = True


DEATHS = st.builds(Death, st.integers(0, 2), st.integers(1, 50), st.integers(0, 3))
TWO_DEATHS = st.lists(DEATHS, min_size=2, max_size=2, unique_by=lambda death: death.server)
PLACES, SEEDS = st.sampled_from(sorted(HOSTS)), st.integers(0, 2**32)
